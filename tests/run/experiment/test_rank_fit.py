"""What several ranks cannot compute or shard is refused before the run, or named in the plan; whole states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import hookrun
from hookrun.engine.plan.plan import ResolvedPlan
from hookrun.errors import CompileError
from hookrun.run.experiment.metrics.losses import load_loss
from hookrun.run.experiment.rank_fit import (
    check_ranks,
    differences,
    hook_misfits,
    settings_misfits,
    under_ranks,
)
from hookrun.run.experiment.settings import Fsdp, Named, Settings
from hookrun.run.experiment.sharding import shard_problems, units, whole_state
from hookrun.run.tasks import parse_experiment

PLAIN: dict[str, Any] = {"task": {"name": "train"}, "model": {"name": "mlp"}, "data": {"name": "digits"}}
ON_FC = {"select": "fc", "hook": "forward"}


def settings(strategy: str = "ddp", loss: dict[str, Any] | None = None, **compute: Any) -> Settings:
    train = {} if loss is None else {"train": {"loss": loss}}
    return parse_experiment({**PLAIN, **train, "compute": {"strategy": strategy, **compute}}).settings


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.idle, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.0), nn.Dropout(0.5)
        self.fc, self.rotated = nn.Linear(4, 2), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rotated(self.fc(self.drop(self.idle(self.norm(x)))).sum(0))


def planned(**hooks: dict[str, Any]) -> Any:
    made = {name: {**ON_FC, **keys} for name, keys in hooks.items()}
    return hookrun.compile({"hooks": made}, Net(), example=((torch.ones(3, 4),), {}))


def misfits(**keys: Any) -> list[str]:
    return [f"{each.where}: {each.what}" for each in hook_misfits(planned(h=keys))]


def test_only_settings_known_to_be_correct_are_accepted() -> None:
    def where(of: Settings, *, scores: bool = True) -> list[str]:
        return [each.where for each in settings_misfits(of, scores=scores)]

    for right in (settings(), settings(precision="fp16"), settings("fsdp", precision="bf16")):
        assert where(right) == []
    assert where(settings("fsdp", precision="fp16", compile=True)) == ["compute.compile", "compute.precision"]
    weighted = {"name": "cross_entropy", "ignore_index": 3}
    assert where(settings(loss=weighted)) == ["train.loss.ignore_index"]
    assert where(settings(loss=weighted), scores=False) == [], "a task without the loss"
    assert where(settings(loss={"name": "cross_entropy", "label_smoothing": 0.1})) == []


@pytest.mark.parametrize("index, refused", [
    ("0", True), ("0:8, ...", True), ("..., 0, :", True), ("..., 0", False), (":, 0", False), ("..., 0:1", False),
])  # fmt: skip
def test_an_index_that_picks_rows_is_refused(index: str, refused: bool) -> None:
    what = "picks rows of the batch by their place, and each rank has only its own"
    expected = [f"hooks.h.index: '{index}' {what}"] if refused else []
    assert misfits(action="scale", factor=2.0, index=index) == expected
    assert misfits(action="scale", factor=2.0, hook="grad", select="fc.weight", index=index) == []


def test_hooks_that_need_all_rows_of_the_batch_are_refused() -> None:
    assert "hooks.h.action: clip_norm needs all rows" in misfits(action="clip_norm", max_norm=1)[0]
    assert misfits(action="clip_norm", max_norm=1, hook="optimizer_step_pre") == []
    (whole,) = misfits(action="capture", select="rotated")
    assert "it has no row for each sample on rotated" in whole
    assert misfits(action="capture") == misfits(action="noise", std=0.1) == []
    assert misfits(action="python", function=lambda x, context: x) == [], "it is refused when it draws"


def test_noise_at_tokens_is_refused() -> None:
    hook = {"select": "0", "hook": "forward", "action": "noise", "std": 0.1, "tokens": -1}
    (found,) = hook_misfits(hookrun.compile({"h": hook}, nn.Sequential(nn.Embedding(4, 4))))
    assert found.where == "hooks.h.tokens"


def test_results_that_differ_are_named() -> None:
    loss = load_loss(Named(name="mse"))
    plan = planned(seen={"action": "stats"}, kept={"action": "capture"}, finite={"action": "check"})
    told = "seen: stats reports each rank's own rows"
    assert list(differences(plan, Net(), loss, trains=False)) == [told]
    checked = planned(mean={"action": "check", "of": "mean", "max": 1})
    assert list(differences(checked, Net(), loss, trains=False)) == [
        "mean: check reports each rank's own rows"
    ]
    assert list(differences(plan, Net(), loss, trains=True)) == [
        "batch statistics are those of a rank's own rows: norm", "dropout draws other masks on each rank: drop", told
    ]  # fmt: skip
    attention = nn.Sequential(nn.MultiheadAttention(4, 2, dropout=0.1), nn.MultiheadAttention(4, 2))
    assert list(differences(planned(), attention, loss, trains=True)) == [
        "dropout draws other masks on each rank: 0"
    ]


def test_the_plan_says_what_each_hook_sees() -> None:
    plan = planned(
        kept={"action": "capture"}, seen={"action": "stats"}, edit={"action": "scale", "factor": 2.0},
        checked={"action": "check"}, grad={"action": "stats", "hook": "grad"},
        frozen={"action": "freeze", "hook": "apply", "select": "norm"},
        mean={"action": "check", "of": "mean", "max": 1},
        loss={"action": "check", "of": "loss", "max_ratio": 2, "over": {"steps": 9}},
    )  # fmt: skip
    assert under_ranks(plan) == ("under ranks", {
        "mean": "differs: own rows", "loss": "reduced, once",
        "kept": "all rows", "seen": "differs: own rows", "edit": "own rows", "checked": "own rows",
        "grad": "reduced, once", "frozen": "the same on each",
    })  # fmt: skip


def test_strict_makes_a_mistake_of_each_difference() -> None:
    plan = planned(seen={"action": "stats"}, h={"action": "clip_norm", "max_norm": 1})
    loss = load_loss(Named(name="mse"))
    good = planned(seen={"action": "stats"})
    notes = check_ranks(good, Net(), loss, settings(), trains=False)
    assert notes == ["differs from one process: seen: stats reports each rank's own rows"]
    strict = settings().model_copy(update={"strict": True})
    with pytest.raises(CompileError) as caught:
        check_ranks(plan, Net(), loss, strict, trains=False)
    assert [each.where for each in caught.value.errors] == ["hooks.h.action", "compute.strategy"]
    mixed = settings("fsdp", fsdp={"mixed_precision": "bf16"})
    assert "are in bf16" in check_ranks(good, Net(), loss, mixed, trains=False)[-1]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(2, 2, bias=False)
        self.tied = nn.Linear(2, 2, bias=False)
        self.tied.weight = self.head.weight


def problems(wrap: Any, model: nn.Module) -> list[tuple[str, str]]:
    settings = SimpleNamespace(compute=SimpleNamespace(fsdp=Fsdp.model_validate({"wrap": wrap})))
    plan = cast(ResolvedPlan, SimpleNamespace(hooks=()))
    return [(each.where, each.what) for each in shard_problems(cast(Settings, settings), model, plan)]


def test_inner_modules_are_units_before_outer_ones() -> None:
    assert units(Fsdp(), Tied()) == []
    found = units(Fsdp.model_validate({"wrap": "**"}), Tied())
    assert "" not in found
    assert set(found) >= {"blocks.0", "blocks.0.0", "head"}
    depths = [path.count(".") for path in found]
    assert depths == sorted(depths, reverse=True)


def test_what_cannot_be_sharded_is_an_error() -> None:
    model = Tied()
    where = "compute.fsdp.wrap"
    assert problems("blocks.*", model) == []
    assert problems("layers.*", model) == [(where, "'layers.*' matches no module")]
    ((at, what),) = problems("blocks", model)
    assert at == where
    assert what.startswith("blocks is a list or dict of modules")
    model.head.temperature = nn.Parameter(torch.ones(()))
    ((at, what),) = problems("blocks.*", model)
    assert at == "compute.strategy"
    assert "without dimensions: head.temperature" in what


def test_the_state_has_shared_weights_once() -> None:
    model = Tied()
    kept = whole_state(model, keeps=True)
    assert kept.keys() == model.state_dict().keys()
    for name, each in model.state_dict().items():
        assert torch.equal(each, kept[name])
    assert kept["head.weight"] is kept["tied.weight"]
    dropped = whole_state(model, keeps=False)
    assert dropped.keys() == kept.keys()
    for each in dropped.values():
        assert not each.numel()
