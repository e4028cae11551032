"""What several ranks cannot compute as one process does is refused before the run, or named in the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hookrun
from hookrun.errors import CompileError
from hookrun.spec import Settings
from hookrun.spec.experiment import Named
from hookrun.tasks import parse_experiment, prepare
from hookrun.tasks.metrics.losses import load_loss
from hookrun.tasks.sharded.rank_fit import (
    check_ranks,
    differences,
    hook_misfits,
    settings_misfits,
    under_ranks,
)

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


def test_settings_that_are_not_known_to_be_correct_are_refused_and_the_others_are_not() -> None:
    def where(of: Settings, *, scores: bool = True) -> list[str]:
        return [each.where for each in settings_misfits(of, scores=scores)]

    assert (
        where(settings())
        == where(settings(precision="fp16"))
        == where(settings("fsdp", precision="bf16"))
        == []
    )
    assert where(settings("fsdp", precision="fp16", compile=True)) == ["compute.compile", "compute.precision"]
    weighted = {"name": "cross_entropy", "ignore_index": 3}
    assert where(settings(loss=weighted)) == ["train.loss.ignore_index"]
    assert where(settings(loss=weighted), scores=False) == [], "a task without the loss"
    assert where(settings(loss={"name": "cross_entropy", "label_smoothing": 0.1})) == []


@pytest.mark.parametrize("index, refused", [
    ("0", True), ("0:8, ...", True), ("..., 0, :", True), ("..., 0", False), (":, 0", False), ("..., 0:1", False),
])  # fmt: skip
def test_an_index_that_picks_rows_is_refused_and_one_within_a_row_is_not(index: str, refused: bool) -> None:
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


def test_noise_at_tokens_is_refused_because_each_rank_has_its_own_positions() -> None:
    hook = {"select": "0", "hook": "forward", "action": "noise", "std": 0.1, "tokens": -1}
    (found,) = hook_misfits(hookrun.compile({"h": hook}, nn.Sequential(nn.Embedding(4, 4))))
    assert found.where == "hooks.h.tokens"


def test_results_that_differ_are_named_and_those_of_layers_only_in_training() -> None:
    loss, plan = load_loss(Named(name="mse")), planned(seen={"action": "stats"}, kept={"action": "capture"})
    told = "seen: stats reports each rank's own rows"
    assert list(differences(plan, Net(), loss, trains=False)) == [told]
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
    )  # fmt: skip
    assert under_ranks(plan) == ("under ranks", {
        "kept": "all rows", "seen": "differs: own rows", "edit": "own rows", "checked": "own rows",
        "grad": "reduced, once", "frozen": "the same on each",
    })  # fmt: skip


def test_all_mistakes_come_together_and_strict_makes_one_of_each_difference() -> None:
    plan, loss = (
        planned(seen={"action": "stats"}, h={"action": "clip_norm", "max_norm": 1}),
        load_loss(Named(name="mse")),
    )
    good = planned(seen={"action": "stats"})
    notes = check_ranks(good, Net(), loss, settings(), trains=False)
    assert notes == ["differs from one process: seen: stats reports each rank's own rows"]
    strict = settings().model_copy(update={"strict": True})
    with pytest.raises(CompileError) as caught:
        check_ranks(plan, Net(), loss, strict, trains=False)
    assert [each.where for each in caught.value.errors] == ["hooks.h.action", "compute.strategy"]
    mixed = settings("fsdp", fsdp={"mixed_precision": "bf16"})
    assert "are in bf16" in check_ranks(good, Net(), loss, mixed, trains=False)[-1]


def test_a_task_is_checked_when_it_is_prepared_whether_there_are_several_processes_or_not() -> None:
    ddp = {**PLAIN, "compute": {"strategy": "ddp", "device": "cpu"}}
    with pytest.raises(CompileError, match=r"hooks\.h\.action: clip_norm needs all rows"):
        prepare(parse_experiment({**ddp, "hooks": {"h": {**ON_FC, "action": "clip_norm", "max_norm": 1}}}))
    notes = prepare(parse_experiment({**ddp, "hooks": {"h": {**ON_FC, "action": "stats"}}})).notes
    assert "differs from one process: h: stats reports each rank's own rows" in notes
