"""A user's own losses, metrics, optimizers, schedules and data, by names of a package that is trusted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import cast

import pytest
import torch
from own_losses import SOURCE as OWN_LOSSES
from torch.nn.functional import cross_entropy

from hookrun.command.compose.compose import compose_dict
from hookrun.errors import HookrunError, SpecError
from hookrun.run.experiment.metrics.metrics import METRICS, load_metrics
from hookrun.run.experiment.metrics.rows import of_samples
from hookrun.run.experiment.prepared import Prepared
from hookrun.run.passes.average import Average
from hookrun.run.tasks import parse_experiment, prepare

SOURCE = f"""{OWN_LOSSES}
def halve(value):
    return value / 2

def margin(output, target):
    top = output.topk(2, dim=1).values
    return (top[:, 0] - top[:, 1]).mean().item()

margin.direction = "maximize"

def right(output, target):
    return (output.argmax(1) == target).float().mean()

def step(output, target):
    return 0

class Mine(torch.optim.SGD):
    def __init__(self, params, lr=0.1, boost=1.0):
        super().__init__(params, lr=lr * boost)

class Closed(torch.optim.SGD):
    def step(self, closure):
        pass

class Halving(torch.optim.lr_scheduler.StepLR):
    def __init__(self, optimizer, size=1):
        super().__init__(optimizer, size, gamma=0.5)

class Data:
    num_classes = 3
    def __init__(self, split, length=8, seed=None):
        self.length = length if split == "train" else 4
        self.seed = seed
    def __len__(self):
        return self.length
    def __getitem__(self, index):
        return [float(index)] * 5, index % 3

def train_only(split):
    return Data(split) if split == "train" else None

def no_pairs(split):
    return [1, 2, 3]

def no_data(split):
    return 3
"""
SHORT = ("model=mlp", "train.epochs=1", "train.limit_batches=2", "train.log_every=1", "data.batch_size=32")
SCORES = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]])
LABELS = torch.tensor([0, 2])


@pytest.fixture(autouse=True)
def _package(trusted: Callable[..., None]) -> None:
    trusted(ownpkg=SOURCE, ownpkg2=SOURCE)


def test_a_run_with_its_own_loss_metrics_optimizer_schedule_and_hook(executed, tmp_path) -> None:
    wanted = (
        *SHORT,
        "train.loss={name: 'ownpkg:mine', scale: 2}",
        "task.metrics=[loss, 'ownpkg:right', accuracy, top5_accuracy, 'ownpkg:margin']",
        "train.optimizer.name=ownpkg:Mine", "train.optimizer.lr=1.0", "+train.optimizer.boost=0.5",
        "train.scheduler={name: 'ownpkg:Halving', interval: step}",
        "+hooks.h={select: fc, hook: forward, action: python, function: 'ownpkg:Smooth', enabled: false}",
    )  # fmt: skip
    found = executed(*wanted)
    first, second, _, val = found.metrics
    assert list(first)[4:] == ["loss", "right", "accuracy", "top5_accuracy", "margin", "lr"]
    assert first["right"] == first["accuracy"] and val["right"] == pytest.approx(val["accuracy"])
    assert (first["lr"], second["lr"]) == (0.5, 0.25)
    code = found.plan["code"]
    assert {where: each["function"] for where, each in code.items()} == {
        "train.loss": "ownpkg:mine", "task.metrics.right": "ownpkg:right", "task.metrics.margin": "ownpkg:margin",
        "train.optimizer.name": "ownpkg:Mine", "train.scheduler.name": "ownpkg:Halving",
    }  # fmt: skip


def test_the_hash_of_the_plan_follows_the_source(tmp_path) -> None:
    def plan_hash(*overrides: str) -> str:
        sys.modules.pop("ownpkg", None)
        ready = prepare(parse_experiment(compose_dict(["compute=cpu", *overrides])))
        return cast(Prepared, ready).plan.hash

    used = [["train.loss=ownpkg:mine"], ["train.optimizer.name=ownpkg:Mine"]]
    before = [plan_hash(*each) for each in used]
    assert [plan_hash(*each) for each in used] == before and plan_hash() not in before
    assert plan_hash("task=evaluate", *used[1]) == plan_hash("task=evaluate"), "which has no optimizer"
    (tmp_path / "ownpkg.py").write_text(SOURCE + "\n# changed\n")
    after = [plan_hash(*each) for each in used]
    assert all(one != other for one, other in zip(before, after, strict=True))


def test_all_untrusted_names_are_refused_together_and_never_imported(refused, monkeypatch) -> None:
    monkeypatch.delenv("HOOKRUN_TRUST")
    said = refused(
        "train.loss=ownpkg:mine", "task.metrics=[loss, 'ownpkg:right']", "train.optimizer.name=ownpkg:Mine",
        "data=python", "data.factory=ownpkg:Data",
    )  # fmt: skip
    for where in ("train.loss", "task.metrics.1", "train.optimizer.name", "data.factory"):
        assert f"{where}: the package 'ownpkg' is not trusted" in said
    assert "+trust=[ownpkg]" in said and "HOOKRUN_TRUST=ownpkg" in said
    hook = "+hooks.h={select: fc, hook: forward, action: python, function: 'ownpkg:breaks'}"
    assert "hooks.h.function: the package 'ownpkg' is not trusted" in refused(hook)
    assert "ownpkg" not in sys.modules


def test_typed_trust_applies_to_all_names(run, monkeypatch) -> None:
    monkeypatch.delenv("HOOKRUN_TRUST")
    found = run(
        "+trust=[ownpkg]", "data=python", "data.factory=ownpkg:Data", "model=mlp", "train.epochs=1",
        "train.loss=ownpkg:Smooth", "train.optimizer.name=ownpkg:Mine", "task.metrics=['ownpkg:right']",
        "+hooks.h={select: fc, hook: forward, action: python, function: 'ownpkg:halve'}",
    )  # fmt: skip
    assert [line["split"] for line in found.metrics] == ["train", "train", "val"]


def test_metrics_are_means_over_samples_in_the_given_order() -> None:
    metrics = load_metrics(["ownpkg:margin", "accuracy", "top5_accuracy"])
    average = Average(metrics)
    average.add(torch.tensor(1.0), of_samples(SCORES, LABELS))
    average.add(torch.tensor(4.0), of_samples(SCORES[:1], LABELS[:1]))
    assert average.read() == pytest.approx(
        {"loss": 2.0, "margin": (1 + 2 + 1) / 3, "accuracy": 2 / 3, "top5_accuracy": 1.0}
    )
    assert [each.direction for each in metrics] == ["maximize", "maximize", "maximize"]
    assert {name: each.direction for name, each in METRICS.items()}["loss"] == "minimize"
    values = Average(load_metrics(["mean_squared_error", "mean_absolute_error"]))
    values.add(torch.tensor(0.0), of_samples(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 0.0])))
    assert values.read() == {"loss": 0.0, "mean_squared_error": 5.0, "mean_absolute_error": 2.0}


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["ownpkg:mine", "ownpkg2:mine"], "two metrics have the name 'mine'"),
        (["loss", "loss"], "two metrics have the name 'loss'"),
        (["ownpkg:step"], "has another meaning there"),
        (["os:getpid"], "is not trusted"),
    ],
)
def test_names_of_metrics_are_checked_before_the_run(names: list[str], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        load_metrics(names)


def test_a_metric_that_cannot_be_computed_is_an_error() -> None:
    for name, target, says in (
        ("ownpkg:vector", LABELS, "expected one number"),
        ("ownpkg:breaks", LABELS, "failed: AttributeError"),
        ("accuracy", SCORES, "'accuracy' needs class scores"),
    ):
        with pytest.raises(HookrunError, match=says):
            Average(load_metrics([name])).add(torch.tensor(1.0), of_samples(SCORES, target))


def test_predict_computes_the_metrics_that_are_listed(executed) -> None:
    few = ("task=predict", "train.limit_batches=1")
    assert set(executed(*few).metrics[-1]) == {"split", "epoch", "step", "samples"}
    found = executed(*few, "task.metrics=[loss, 'ownpkg:right']")
    line, labels = found.metrics[-1], found.labels_of(found.predictions)
    assert line["loss"] == pytest.approx(float(cross_entropy(found.predictions[:], labels)))
    assert line["right"] == pytest.approx(float((found.predictions[:].argmax(1) == labels).float().mean()))


def test_classes_that_do_not_derive_from_torchs_are_refused(refused) -> None:
    said = refused("train.optimizer.name=ownpkg:Smooth", "train.scheduler={name: 'ownpkg:Mine'}")
    assert "train.optimizer.name: 'ownpkg:Smooth' is the class Smooth, not a subclass of torch.optim" in said
    assert "train.scheduler.name: 'ownpkg:Mine' is the class Mine, not a subclass" in said
    assert "needs a closure in step" in refused("train.optimizer.name=ownpkg:Closed")
    said = refused("train.optimizer.name=ownpkg:Mine", "+train.optimizer.bost=2")
    assert "train.optimizer.bost: 'ownpkg:Mine' takes no argument 'bost'; did you mean 'boost'?" in said


def test_data_of_the_users_own(executed, refused) -> None:
    own = ("data=python", "model=mlp", "train.epochs=1", "train.log_every=1")
    found = executed(*own, "data.factory=ownpkg:Data", "data.args.length=6")
    assert [line["split"] for line in found.metrics] == ["train", "train", "val"]
    assert found.labels(torch.tensor([4, 5]), "train").tolist() == [1, 2]
    assert found.plan["code"]["data.factory"]["function"] == "ownpkg:Data"
    only = executed(*own, "data.factory=ownpkg:train_only")
    assert [line["split"] for line in only.metrics] == ["train", "train"]
    for factory, says in (
        ("ownpkg:no_pairs", "sample 0 of 'ownpkg:no_pairs' is a int, expected (input, target)"),
        ("ownpkg:no_data", "returned an object of type int for the split"),
        ("ownpkg:train_onyl", "did you mean 'train_only'?"),
    ):
        assert says in refused(*own, f"data.factory={factory}")
    assert "data.args.lenth: " in refused(*own, "data.factory=ownpkg:Data", "data.args.lenth=6")
