"""Rules that tripped: the failed checks of a statistic, by hook, module and rule, and the marks that curves get."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from hookrun.errors import counted, listed, shortened
from hookrun.report.curves import Record, place_of
from hookrun.report.draw.text import module_name, number
from hookrun.report.facts import RunData
from hookrun.report.lines import is_number, is_place
from hookrun.store.records import grouped

MOST_MARKS = 24
"""Marks of a curve."""
MOST_UNITS = 24
_SHOWN = 2
_WORD = 30
_SEVERITIES = ("warn", "stop", "error")


@dataclass(frozen=True)
class Trip:
    """A rule of a hook that tripped at a module, once or more often.

    rule:  ``zeros, max 0.99 over 50 steps``
    worst: sorts trips: the policy, then how far beyond the bound the number was, if that can be told
    found: the number that tripped it first, of several units the least and the largest
    units: those that tripped it, by number
    policy: what followed
    """

    hook: str
    module: str
    rule: str
    worst: tuple[int, float]
    first: Record
    last: Record
    times: int
    found: str
    units: str
    policy: str


def is_trip(record: Record) -> bool:
    """Whether a record says that a rule tripped."""
    return record.get("ok") is False and isinstance(record.get("rule"), str)


def trips(facts: RunData) -> list[Trip]:
    """The rules that tripped at each module, the worst first."""
    found = list[Trip]()
    for records in grouped(filter(is_trip, facts.stats.records), _site).values():
        first = records[0]
        units = set[int]()
        for record in records:
            numbers = record.get("units")
            units.update(filter(is_place, numbers if isinstance(numbers, list) else ()))
        found.append(
            Trip(
                hook=first["hook"],
                module=module_name("".join(place_of(first))),
                rule=_rule(first),
                worst=max(map(_badness, records)),
                first=first,
                last=records[-1],
                times=len(records),
                found=_found(first),
                units=listed(map(str, sorted(units)), MOST_UNITS),
                policy=shortened(str(first.get("policy") or "")),
            )
        )
    found.sort(key=lambda trip: trip.worst, reverse=True)
    return found


def _site(record: Record) -> tuple[Any, ...]:
    return record["hook"], place_of(record), record["mode"], record["rule"]


def _rule(record: Record) -> str:
    """Such as ``zeros, max 0.99 over 50 steps``."""
    text = f"{record.get('of')}, {record['rule']} {number(record.get('bound'))}"
    if is_place(record.get("steps")):
        text += f" over {counted(record['steps'], 'step')}"
    return shortened(text, 100)


def _numbers(record: Record) -> list[float]:
    """The numbers that tripped a rule."""
    found: Any = record.get("number")
    if not isinstance(found, list):
        found = [found]
    return list(map(float, filter(is_number, found)))


def _found(record: Record) -> str:
    numbers = _numbers(record)
    if not numbers:
        return ""
    least, largest = number(min(numbers)), number(max(numbers))
    return least if least == largest else f"{least} to {largest}"


def _badness(record: Record) -> tuple[int, float]:
    """The policy; a number that is not finite is worst, then the one furthest beyond `max` or `min`."""
    policy = record.get("policy")
    severity = _SEVERITIES.index(policy) if policy in _SEVERITIES else 0
    bound: Any = record.get("bound")
    excess = 1.0
    for value in _numbers(record):
        if not math.isfinite(value):
            excess = math.inf
        elif is_number(bound) and record["rule"] == "max" and bound > 0:
            excess = max(excess, value / bound)
        elif is_number(bound) and record["rule"] == "min" and value > 0:
            excess = max(excess, bound / value)
    return severity, excess


def trips_line(found: Sequence[Trip]) -> str:
    """``2 rules tripped: dead at layer3.1.relu, spike at fc.weight``, the worst first; ``""`` if none has."""
    hooks = grouped(found, lambda trip: trip.hook)
    if not hooks:
        return ""
    named = list[str]()
    for name, of_hook in hooks.items():
        more = f" and {len(of_hook) - 1} more" if len(of_hook) > 1 else ""
        named.append(f"{shortened(name, _WORD)} at {shortened(of_hook[0].module, _WORD)}{more}")
    return f"{counted(len(hooks), 'rule')} tripped: {listed(named, _SHOWN)}"


def marks_of(facts: RunData) -> dict[tuple[str, str, str], dict[str, list[tuple[float, str]]]]:
    """(hook type, mode, statistic) -> the marks of its curves; the hook type is "" for hooks that are not planned."""
    found = dict[tuple[str, str, str], dict[str, list[tuple[float, str]]]]()
    for record in filter(is_trip, facts.stats.records):
        kind = type_of(facts, record["hook"]), record["mode"], str(record.get("of"))
        of_curve = found.setdefault(kind, {}).setdefault("".join(place_of(record)), [])
        if len(of_curve) < MOST_MARKS:
            of_curve.append((float(record["step"]), f"{record['hook']}: {_rule(record)}"))
    return found


def loss_marks(facts: RunData) -> list[tuple[float, str]]:
    """The marks of the curve of the training loss."""
    marks = list[tuple[float, str]]()
    for (_, mode, statistic), of_curve in marks_of(facts).items():
        if statistic == "loss" and mode == "train":
            marks += chain.from_iterable(of_curve.values())
    return marks[:MOST_MARKS]


def type_of(facts: RunData, hook: str) -> str:
    """The type of a hook."""
    return facts.planned[hook].hook or "" if hook in facts.planned else ""
