"""Schedules of schedules: mistakes in their parts, the length of each part, the range of their milestones."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import ConstantLR, ReduceLROnPlateau, SequentialLR

from hookrun.spec.experiment import Schedule
from hookrun.tasks.loop.composed import lengths, notes, problems, reach

CONSTANT = {"name": "ConstantLR"}


def sequential(*parts: dict[str, Any], **args: Any) -> Schedule:
    return Schedule.model_validate({"name": "SequentialLR", "schedulers": parts, **args})


def test_each_part_lasts_until_the_next_milestone_and_at_least_one_step() -> None:
    assert lengths(sequential(CONSTANT, CONSTANT, CONSTANT, milestones=[3, 5]), 20) == [3, 2, 15]
    assert lengths(sequential(CONSTANT, CONSTANT, milestones=[30]), 20) == [30, 1], "it ends before"
    assert lengths(sequential(CONSTANT, CONSTANT), 20) == [20, 20], "chained: all at once"


def test_the_last_milestone_may_be_that_of_an_inner_schedule() -> None:
    inner = {"name": "SequentialLR", "schedulers": [CONSTANT, CONSTANT], "milestones": [9]}
    assert reach(sequential(inner, CONSTANT, milestones=[4])) == 9
    assert reach(None) == reach(sequential(CONSTANT)) == 0


def test_wrong_parts_and_milestones_are_reported_with_their_key_paths() -> None:
    named = sequential(CONSTANT, {"name": "ReduceLROnPlateau"}, milestones=[4, 4])
    found = problems(named, SequentialLR, [ConstantLR, ReduceLROnPlateau], "train.scheduler")
    assert [each.where for each in found] == [
        "train.scheduler.schedulers.1.name", "train.scheduler.milestones",
    ]  # fmt: skip
    right = sequential(CONSTANT, CONSTANT, milestones=[4])
    assert not list(problems(right, SequentialLR, [ConstantLR, ConstantLR], "train.scheduler"))
    cycle = sequential(sequential({"name": "one_cycle_lr"}).model_dump())
    assert [each.split(":")[0] for each in notes(cycle, "s")] == ["s.schedulers.0.schedulers.0"]
