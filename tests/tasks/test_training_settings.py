"""Mistakes in the settings of training are reported before the run; the trained and saved parts are printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hookrun.cli import main
from hookrun.errors import CompileError, SpecError
from hookrun.tasks import parse_experiment, prepare

BIAS = {"select": "relu1", "hook": "forward", "action": "add_bias", "value": 0, "trainable": True}
ROOT: dict[str, Any] = {"model": {"name": "cnn"}, "data": {"name": "digits"}, "compute": {"device": "cpu"}}
SGD = {"name": "SGD", "lr": 0.1}
CONSTANT = {"name": "ConstantLR"}


def prepared(hooks: dict[str, Any] | None = None, **train: Any) -> Any:
    return prepare(parse_experiment({**ROOT, "train": train, "hooks": hooks or {}}))


def refusal(hooks: dict[str, Any] | None = None, **train: Any) -> str:
    with pytest.raises((SpecError, CompileError)) as caught:
        prepared(hooks, **train)
    return str(caught.value)


def groups(*members: dict[str, Any]) -> dict[str, Any]:
    return {"optimizer": {**SGD, "groups": list(members)}}


def sequence(*parts: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"scheduler": {"name": "SequentialLR", "schedulers": list(parts), **keys}}


def test_what_is_not_trained_is_frozen_before_the_hooks_are_compiled() -> None:
    only = prepared({"shift": BIAS}, parameters="hook:shift")
    assert only.trained.names == ["relu1.shift_bias"]
    assert not any(parameter.requires_grad for parameter in only.model.parameters())
    seen = {"g": {"select": "conv1.weight", "hook": "grad", "action": "capture"}}
    assert "conv1.weight: carries no gradient" in refusal(seen, parameters="fc")
    assert "found an empty list" in refusal(parameters=[])


def test_a_learning_rate_for_each_group_counts_those_that_hooks_fill() -> None:
    rates = {"scheduler": {"name": "OneCycleLR", "max_lr": [1, 2], "cycle_momentum": False}}
    prepared({"shift": BIAS}, **groups({"select": "hook:*", "lr": 1}), **rates)
    assert "train.scheduler: OneCycleLR refuses its arguments" in refusal(**rates)


def test_schedules_of_schedules() -> None:
    wrong = refusal(
        **sequence({"name": "LinearLRR"}, {"name": "StepLR", "interval": "step"}, milestones=[3, 4])
    )
    assert "train.scheduler.schedulers.0.name: found 'LinearLRR'" in wrong
    assert "train.scheduler.schedulers.1.interval: 'StepLR' takes no argument 'interval'" in wrong
    assert "train.scheduler.schedulers.1.step_size: is missing" in wrong
    for milestones in (4, [0], [True], ["4"], [10**13]):
        found = refusal(**sequence(CONSTANT, CONSTANT, milestones=milestones))
        assert "train.scheduler.milestones: found" in found and "whole numbers from 1" in found
    assert "train.scheduler.milestones: is missing" in refusal(**sequence(CONSTANT, CONSTANT))
    inner = sequence(CONSTANT, CONSTANT, milestones=[1])["scheduler"]
    assert "cannot hold a SequentialLR" in refusal(**sequence(CONSTANT, inner, milestones=[9]))
    assert "train.scheduler.schedulers.0: ConstantLR refuses its arguments" in (
        refusal(**sequence({"name": "ConstantLR", "factor": 7}, CONSTANT, milestones=[9]))
    )
    cycle = prepared(
        **sequence({"name": "OneCycleLR", "max_lr": 1, "cycle_momentum": False}, CONSTANT, milestones=[4])
    )
    assert "schedulers.0: torch's OneCycleLR sets the learning rate" in "".join(cycle.notes)


def test_values_out_of_range() -> None:
    for key, value in [("clip_grad_norm", 0), ("clip_grad_value", float("inf")), ("ema", {"decay": 1})]:
        assert f"train.{key}" in refusal(**{key: value})
    assert "set one of them" in refusal(clip_grad_norm=1, clip_grad_value=1)
    assert "train.checkpoint.save: found 'bst'" in refusal(checkpoint={"save": "bst"})


QUICK = ("train.limit_batches=1", "train.epochs=1", "model=mlp")


@pytest.mark.parametrize(("save", "kept"), [("best", "b"), ("none", "")])
def test_only_the_requested_checkpoints_are_written(run, capsys, save: str, kept: str) -> None:
    found = run(*QUICK, f"train.checkpoint.save={save}")
    assert "".join(sorted(path.name[0] for path in found.path.rglob("*.safetensors"))) == kept
    said = capsys.readouterr().out
    assert ("checkpoints: none, as train.checkpoint.save is none" in said) == (save == "none")
    weights = found.path / "checkpoints" / "last.safetensors"
    if save == "best":
        assert main([*QUICK, "task=evaluate", f"model.weights={weights}"]) == 2
        error = capsys.readouterr().err
        assert "best.safetensors" in error and "a run keeps what its train.checkpoint.save says" in error


def test_a_sweep_keeps_the_best_by_default(tmp_path: Path) -> None:
    choices = "train.checkpoint.save=null,last"
    assert main(["-m", *QUICK, "compute.device=cpu", "hydra.sweep.dir=sweep", choices]) == 0
    names = [path.relative_to(tmp_path / "sweep").as_posix() for path in tmp_path.rglob("*.safetensors")]
    assert sorted(names) == ["0/checkpoints/best.safetensors", "1/checkpoints/last.safetensors"]


def test_a_milestone_after_the_end_is_noted(executed, capsys) -> None:
    parts = "schedulers: [{name: ConstantLR}, {name: LinearLR}]"
    executed(*QUICK, f"train.scheduler={{name: SequentialLR, milestones: [7], interval: step, {parts}}}")
    assert "NOTE: train.scheduler: the run ends after step 1, before milestone 7" in capsys.readouterr().out
