"""Schedules that consist of other schedules: SequentialLR (one after the other) and ChainedScheduler (all at once)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from hookrun.errors import Problem
from hookrun.spec.experiment import MOST, Schedule
from hookrun.spec.selector.base import shown

CLASSES: tuple[type[LRScheduler], ...] = (SequentialLR, ChainedScheduler)
GIVEN = frozenset({"optimizer", "schedulers"})
"""The arguments of these classes that hookrun passes itself."""


def place(where: str, number: int) -> str:
    """The key path of one of the schedules of a composed one."""
    return f"{where}.schedulers.{number}"


def problems(named: Schedule, cls: type, inner: Sequence[type | None], where: str) -> Iterator[Problem]:
    """The mistakes in the parts of a schedule.

    cls:   the class of the schedule
    inner: the classes of its parts; None for an unknown name
    where: the key path of the schedule
    """
    key = f"{where}.schedulers"
    if cls not in CLASSES:
        if named.schedulers is not None:
            hint = "SequentialLR and ChainedScheduler take it"
            yield Problem(key, f"'{cls.__name__}' takes no argument 'schedulers'", hint)
        return
    if not named.schedulers:
        hint = "list them, each with its name and arguments: schedulers: [{name: LinearLR, total_iters: 100}, ...]"
        yield Problem(key, f"is missing: '{cls.__name__}' needs a list of schedules", hint)
        return
    for number, part in enumerate(inner):
        if part is ReduceLROnPlateau:
            text = f"ReduceLROnPlateau watches the validation loss, which a {cls.__name__} does not pass on"
            yield Problem(f"{place(where, number)}.name", text, "use it alone, or another schedule here")
        elif part in CLASSES and cls is SequentialLR:
            text = f"torch's SequentialLR cannot hold a {part.__name__}"
            hint = "list plain schedules here, with a milestone between neighbours"
            yield Problem(f"{place(where, number)}.name", text, hint)
    if cls is SequentialLR and "milestones" in named.args:
        yield from _wrong_milestones(named.args["milestones"], len(inner), f"{where}.milestones")


def _wrong_milestones(found: Any, parts: int, where: str) -> Iterator[Problem]:
    numbers = found if isinstance(found, list | tuple) else [found]
    if not isinstance(found, list | tuple) or not all(
        isinstance(each, int) and not isinstance(each, bool) and 1 <= each <= MOST for each in numbers
    ):
        hint = "a milestone is the step or epoch (see `interval`) at which the next schedule begins: [100]"
        yield Problem(where, f"found {shown(found)}, expected a list of whole numbers from 1", hint)
    elif any(second <= first for first, second in pairwise(numbers)):
        yield Problem(where, f"found {shown(found)}, expected each milestone to be greater than the last")
    elif len(numbers) != parts - 1:
        text = f"found {len(numbers)} for {parts} schedules, expected one between each two: {parts - 1}"
        yield Problem(where, text)


def lengths(named: Schedule, intervals: int) -> list[int]:
    """How many times each part is stepped in a run of `intervals` steps or epochs; at least 1 for each."""
    parts = len(named.schedulers or ())
    if "milestones" not in named.args:
        return [intervals] * parts
    bounds = [0, *named.args["milestones"], intervals]
    return [max(end - start, 1) for start, end in pairwise(bounds)]


def reach(named: Schedule | None) -> int:
    """The last milestone in a schedule and its parts; 0 if there is none."""
    if named is None or named.schedulers is None:
        return 0
    return max([*named.args.get("milestones", []), *map(reach, named.schedulers)], default=0)


def compose(
    cls: type, optimizer: Optimizer, parts: Sequence[LRScheduler | None], args: dict[str, Any]
) -> Any:
    """The schedule that consists of `parts`."""
    return cls(schedulers=parts, optimizer=optimizer, **args)


def notes(named: Schedule, where: str) -> Iterator[str]:
    """Notes on what a user may not expect of a composed schedule."""
    for number, part in enumerate(named.schedulers or ()):
        yield from notes(part, place(where, number))
        if part.name.lower().replace("_", "") == OneCycleLR.__name__.lower():
            yield (
                f"{place(where, number)}: torch's OneCycleLR sets the learning rate that all schedules of the "
                "composition start from to max_lr / div_factor"
            )
