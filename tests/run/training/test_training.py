"""Training: steps, accumulation, precision, schedules, validation, checkpoints, averages, and how it ends."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
from run_files import weights
from torch import nn
from torch.nn import functional as F

from hookrun.cli import main
from hookrun.run.passes import resuming
from hookrun.run.passes.batches import Batch, Batches
from hookrun.run.passes.context import RunContext
from hookrun.run.ranks import ALONE
from hookrun.run.training import loop
from hookrun.run.training.ema import WeightAverage
from hookrun.run.training.finite import all_finite, not_finite
from hookrun.run.training.rank_gradients import StepGradientsOfRanks, step_gradients
from hookrun.run.training.step import Training


def val(run: Any) -> list[dict[str, Any]]:
    return [line for line in run.metrics if line["split"] == "val"]


SGD = ("train.optimizer.name=SGD", "train.optimizer.lr=0.1", "train.shuffle=false", "train.epochs=1")
TWO_EPOCHS = (
    "train.epochs=2", "train.limit_batches=3", "train.log_every=1", "train.optimizer.name=SGD",
    "train.scheduler={name: CosineAnnealingLR}",
    "+hooks.h={select: fc, hook: forward, action: capture, when: {mode: train}}",
)  # fmt: skip
SEVEN_STEPS = (
    "train.steps=7", "train.limit_batches=5", "train.log_every=1", "train.epochs=9", "train.optimizer.lr=1",
    "train.scheduler={name: linear_lr, start_factor: 0.5, total_iters: 2, interval: step}",
)  # fmt: skip
TYPES = ("grad", "post_accumulate_grad", "optimizer_step_pre", "optimizer_step_post")
ACCUMULATED = (
    *SGD, "train.limit_batches=5", "train.accumulate=2",
    *(f"+hooks.{name}={{select: fc.bias, hook: {name}, action: capture}}" for name in TYPES),
    "+hooks.off={select: fc, hook: forward, action: scale, factor: {from: 1, to: 0, steps: [2, 3]}}",
)  # fmt: skip


def test_captures_in_training_have_sample_with_step(shared) -> None:
    capture = shared(*TWO_EPOCHS).captures["h"]["fc"]
    assert capture.shape == (384, 10)
    assert capture.epochs.tolist() == [0] * 192 + [1] * 192
    assert capture.steps.unique().tolist() == list(range(6))
    assert len(capture.sample_ids[:192].unique()) == 192


def test_the_mean_of_each_epoch_is_logged_beside_its_batches(shared) -> None:
    found = shared(*TWO_EPOCHS)
    for epoch in range(2):
        of_epoch = [line for line in found.metrics if (line["split"], line["epoch"]) == ("train", epoch)]
        *batches, mean = of_epoch
        assert [line["of"] for line in of_epoch] == ["batch"] * 3 + ["epoch"]
        assert mean["step"] == 3 * (epoch + 1)
        assert "lr" not in mean
        for name in ("loss", "accuracy"):
            assert mean[name] == pytest.approx(sum(line[name] for line in batches) / 3)
    assert {line["of"] for line in val(found)} == {"epoch"}


def test_gradient_hooks_fire_per_micro_batch(shared) -> None:
    found = shared(*ACCUMULATED)
    assert [len(found.captures[name]["fc.bias"]) for name in TYPES] == [5, 3, 3, 3], "the last group has one"
    gradients = found.captures["grad"]["fc.bias"]
    accumulated = found.captures["post_accumulate_grad"]["fc.bias"]
    torch.testing.assert_close(gradients[0] + gradients[1], accumulated[0])
    assert accumulated.steps.tolist() == [0, 1, 2]
    assert accumulated.sample_ids.tolist() == [-1, -1, -1]


def test_a_validation_leaves_numbers_at_the_step_of_the_training(shared) -> None:
    (line,) = val(shared(*ACCUMULATED))
    assert line["loss"] == pytest.approx(math.log(10)), "the training has ended with a factor of 0"


def test_steps_end_a_run_before_its_epochs_do(shared) -> None:
    found = shared(*SEVEN_STEPS)
    steps = [line["step"] for line in found.metrics if line["of"] == "batch"]
    assert steps == list(range(7))
    assert [line["epoch"] for line in val(found)] == [0, 1]


@pytest.mark.parametrize(
    ("overrides", "rates"),
    [(TWO_EPOCHS, [1e-3] * 3 + [5e-4] * 3), (SEVEN_STEPS, [0.5, 0.75, *[1] * 5])],
    ids=["by epoch", "by step"],
)
def test_schedules_are_chosen_by_name(shared, overrides: tuple[str, ...], rates: list[float]) -> None:
    assert [line["lr"] for line in shared(*overrides).metrics if "lr" in line] == pytest.approx(rates)


@pytest.mark.parametrize(("optimizer", "fused"), [("SGD", False), ("Adam", True)])
def test_every_gradient_is_seen_unscaled_under_a_gradient_scaler(
    executed, ready, optimizer: str, fused: bool
) -> None:
    paths = {"output_grad": "fc", **dict.fromkeys(TYPES[:3], "fc.bias")}
    hooks = [f"+hooks.{kind}={{select: {at}, hook: {kind}, action: capture}}" for kind, at in paths.items()]
    named = (f"train.optimizer.name={optimizer}", f"+train.optimizer.fused={fused}")
    step = ("model=mlp", "train.steps=1", "train.shuffle=false", "compute.precision=fp16")
    scaled = executed(*step, *named, *hooks)
    prepared = ready("model=mlp")
    batch = next(Batches(prepared, "train").epoch(0))
    logits = prepared.model.train()(batch.inputs)
    loss = F.cross_entropy(logits, batch.target)
    of_logits, of_bias = torch.autograd.grad(loss, [logits, prepared.model.fc.bias])
    for kind, path in paths.items():
        true = of_logits if kind == "output_grad" else of_bias[None]
        assert true.abs().max() > 1e-3
        torch.testing.assert_close(scaled.captures[kind][path][:].float(), true, rtol=0.05, atol=1e-3)


Values = dict[str, float]


def after_epochs(
    monkeypatch: pytest.MonkeyPatch, values: list[Values], scheduler: Any = None
) -> tuple[list[int], list[float]]:
    """The epochs whose weights are saved as the best, and the rates after each, if validations give these values."""
    saved = list[int]()
    rates = list[float]()
    context = MagicMock(stopped=False)
    context.evaluate.side_effect = values
    context.settings.train = SimpleNamespace(
        epochs=len(values),
        steps=None,
        checkpoint=SimpleNamespace(keeps=bool, every=SimpleNamespace(epochs=None)),
    )
    none: Any = None
    training = Training(context, none, none, scheduler, "epoch", none, MagicMock(), MagicMock(), none, none)
    monkeypatch.setattr(loop, "_save", lambda context, name: saved.append(training.epoch))
    for _ in values:
        loop._after_epoch(training)
        rates += [] if scheduler is None else scheduler.get_last_lr()
    return saved, rates


NAN = float("nan")


@pytest.mark.parametrize(("values", "saved"), [
    ([{"loss": NAN}, {"loss": 0.5}, {"loss": 0.7}], [0, 1]),
    ([{"loss": 0.5}, {"loss": NAN}, {"loss": 0.4}], [0, 2]),
    ([{"loss": 1.0, "accuracy": 0.5}, {"loss": 0.1, "accuracy": 0.4}, {"loss": 0.1, "accuracy": 0.5}], [0]),
])  # fmt: skip
def test_the_best_weights_are_of_the_highest_accuracy(
    monkeypatch, values: list[Values], saved: list[int]
) -> None:
    """The first of equal ones; a number is better than NaN."""
    assert after_epochs(monkeypatch, values)[0] == saved


def test_the_plateau_schedule_uses_the_validation_loss(monkeypatch) -> None:
    """The second epoch is without improvement, though its accuracy is better."""
    values = [{"loss": loss, "accuracy": 1 - 1 / n} for n, loss in enumerate((1.0, 2.0, 0.5, 0.25), 2)]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=1.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    assert after_epochs(monkeypatch, values, schedule)[1] == [1, 0.5, 0.5, 0.5]


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_best_weights_are_those_of_their_epoch(executed) -> None:
    """The rate is far too high after the first epoch: the best is the first, the last differs."""
    found = executed(
        "train.epochs=2", "train.limit_batches=8", "train.scheduler={name: StepLR, step_size: 1, gamma: 1e4}"
    )
    first, second = (line["accuracy"] for line in val(found))
    assert first > second
    one = executed("train.epochs=1", "train.limit_batches=8")
    assert equal(weights(found, "best"), weights(one, "last"))
    assert not equal(weights(found, "last"), weights(found, "best"))
    again = executed(
        "task=evaluate", "train.limit_batches=8", f"model.weights={found.path}/checkpoints/best.safetensors"
    )
    assert [again.metrics[-1][key] for key in ("loss", "accuracy")] == [
        val(found)[0][key] for key in ("loss", "accuracy")
    ]


def test_without_epochs_the_initial_model_is_saved(executed, ready) -> None:
    found = executed("train.epochs=0")
    assert found.metrics == []
    assert equal(weights(found), ready().model.state_dict())


@pytest.mark.parametrize("keys", ["keep=2", "keep=3", "keep_done=true"])
def test_each_state_that_is_kept_is_written(keys: str, executed, monkeypatch) -> None:
    saved = list[int]()
    write = resuming.write_state

    def counted(executed: Any, about: str, *args: Any, **options: Any) -> Any:
        saved.append(json.loads(about)["at"]["step"])
        return write(executed, about, *args, **options)

    monkeypatch.setattr(resuming, "write_state", counted)
    monkeypatch.setattr(resuming, "INTERVAL", 1e6)  # however slow this machine is
    executed("train.epochs=6", "train.limit_batches=1", f"train.checkpoint.{keys}")
    assert saved == ([1, 6] if keys == "keep=2" else [1, 2, 3, 4, 5, 6])


def test_a_state_is_saved_after_every_step_if_asked_for(executed) -> None:
    kept = ("train.checkpoint.every.steps=1", "train.checkpoint.keep=9", "train.checkpoint.keep_done=true")
    found = executed("train.epochs=1", "train.limit_batches=5", *kept)
    assert len(list((found.path / "checkpoints").glob("state_*"))) == 6


ONE_STEP = ("train.limit_batches=1", "train.epochs=1", "model=mlp")


@pytest.mark.parametrize(("save", "kept"), [("best", "b"), ("none", "")])
def test_only_the_requested_checkpoints_are_written(executed, refused, capsys, save: str, kept: str) -> None:
    found = executed(*ONE_STEP, f"train.checkpoint.save={save}")
    assert "".join(path.name[0] for path in found.path.glob("checkpoints/*.safetensors")) == kept
    said = capsys.readouterr().out
    assert ("checkpoints: none, as train.checkpoint.save is none" in said) == (save == "none")
    weights = found.path / "checkpoints" / "last.safetensors"
    if save == "best":
        error = refused(*ONE_STEP, "task=evaluate", f"model.weights={weights}")
        assert "best.safetensors" in error
        assert "a run keeps what its train.checkpoint.save says" in error


def test_a_sweep_keeps_the_best_by_default(tmp_path) -> None:
    choices = "train.checkpoint.save=null,last"
    assert main(["-m", *ONE_STEP, "compute.device=cpu", "hydra.sweep.dir=sweep", choices]) == 0
    names = [path.relative_to(tmp_path / "sweep").as_posix() for path in tmp_path.rglob("*.safetensors")]
    assert sorted(names) == ["0/checkpoints/best.safetensors", "1/checkpoints/last.safetensors"]


def test_a_milestone_after_the_end_is_noted(executed, capsys) -> None:
    parts = "schedulers: [{name: ConstantLR}, {name: LinearLR}]"
    executed(*ONE_STEP, f"train.scheduler={{name: SequentialLR, milestones: [7], interval: step, {parts}}}")
    assert "NOTE: train.scheduler: the run ends after step 1, before milestone 7" in capsys.readouterr().out


def test_a_single_batch_of_images_is_not_weighted() -> None:
    prepared = SimpleNamespace(loss=SimpleNamespace(ignored=None))
    gradients = step_gradients(cast(RunContext, SimpleNamespace(ranks=ALONE, prepared=prepared)))

    def batch(weight: int, of_tokens: bool) -> Batch:
        return cast(
            Batch, SimpleNamespace(weight_without=lambda _: weight, data=SimpleNamespace(of_tokens=of_tokens))
        )

    assert gradients.shares([batch(5, False)]) == gradients.shares([batch(5, True)]) == [1.0]
    assert gradients.shares([batch(0, True)] * 2) == [0.0, 0.0], "no division by 0"


@pytest.mark.parametrize("sums", [False, True])
def test_a_rank_weights_by_its_rows(sums: bool) -> None:
    gradients = object.__new__(StepGradientsOfRanks)  # without torch's process group
    loss = SimpleNamespace(sums=sums, ignored=None)
    gradients.context = cast(RunContext, SimpleNamespace(prepared=SimpleNamespace(loss=loss)))
    images = SimpleNamespace(of_tokens=False)
    group = [
        SimpleNamespace(whole=8, ids=range(3), data=images),
        SimpleNamespace(whole=2, ids=(), data=images),
    ]
    assert gradients.shares(cast(list[Batch], group)) == ([0.8, 0.2] if sums else [0.3, 0.0])


WRONG = torch.tensor([1.0, torch.inf])
KINDS = {
    "float64": WRONG.double(),
    "float16": WRONG.half(),
    "complex": torch.complex(torch.zeros(2), WRONG),
    "sparse": WRONG.to_sparse(),
    "expanded": WRONG[1:].expand(3),
    "of a graph": WRONG.clone().requires_grad_(),
    "negative": torch.tensor([-torch.inf]),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_finding_a_nonfinite_tensor_changes_none(kind: str) -> None:
    wrong = KINDS[kind]
    right = torch.ones(2)
    largest = torch.tensor([torch.finfo(torch.float32).max])
    assert not all_finite([right, wrong, largest])
    assert not all_finite([wrong])
    assert all_finite([right, torch.ones(2).double(), largest, torch.tensor([1, 2])])
    assert all_finite([])
    assert right.tolist() == [1, 1]
    assert largest.item() == torch.finfo(torch.float32).max
    assert "1 infinite of" in not_finite(wrong) or kind == "expanded"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_result_does_not_depend_on_torch_s_defaults(dtype: torch.dtype) -> None:
    value = torch.ones(3, dtype=torch.float32)
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            for each in (value, value[:1].expand(3)):
                assert all_finite([each])
                assert not all_finite([each, value, each / 0])
    finally:
        torch.set_default_dtype(torch.float32)


def test_only_nonfinite_floats_are_counted() -> None:
    value = [torch.tensor([torch.nan, 1, -torch.inf]), {"a": torch.tensor([torch.nan])}, torch.tensor([3])]
    assert not_finite(value) == "2 NaN and 1 infinite of 4 elements"
    assert not_finite(torch.ones(2)) == not_finite(torch.tensor([1])) == ""


def test_weights_are_restored_after_an_average() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    average = WeightAverage(model, 0.9)
    average.update()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    own = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(ZeroDivisionError), average.swapped_in():
        for name, each in model.named_parameters():
            assert not torch.equal(each, own[name])
        with average.swapped_out():
            for name, each in model.state_dict().items():
                assert torch.equal(each, own[name])
        raise ZeroDivisionError
    for name, each in model.state_dict().items():
        assert torch.equal(each, own[name])
