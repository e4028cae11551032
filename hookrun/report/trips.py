"""Rules that tripped: what a page's first line says of them, and the marks that curves get."""

from __future__ import annotations

from hookrun.errors import counted, shortened
from hookrun.report.curves import Marks, Record, place_of
from hookrun.report.draw.text import module_name, number
from hookrun.report.facts import RunData
from hookrun.store.records import grouped

MOST_MARKS = 24
"""Marks of a curve."""
_WORD = 30
_ENDING = ("error", "stop")
"""Policies that end the run."""


def trips_line(facts: RunData) -> str:
    """``2 rules tripped: spike at fc.weight; dead at relu1 and 3 more``; ``""`` if none has.

    The worst come first: those that ended the run, then those that tripped at the most modules.
    """
    worst = list[tuple[bool, int, str]]()
    for name, records in grouped(facts.trips, lambda record: record["hook"]).items():
        modules = list(grouped(records, place_of))
        where = f"{shortened(name, _WORD)} at {shortened(module_name(''.join(modules[0])), _WORD)}"
        if len(modules) > 1:
            where += f" and {len(modules) - 1} more"
        worst.append((records[0].get("policy") not in _ENDING, -len(modules), where))
    if not worst:
        return ""
    worst.sort()
    return f"{counted(len(worst), 'rule')} tripped: {'; '.join(where for _, _, where in worst[:2])}"


def marks_of(hook: str, facts: RunData) -> dict[tuple[str, str], Marks]:
    """(mode, statistic) -> the marks of the curves of a hook, from rules in hooks of its type."""
    planned = facts.planned.get(hook)
    of_type = list[Record]()
    for record in facts.trips:
        other = facts.planned.get(record["hook"])
        if planned is not None and other is not None and other.hook == planned.hook:
            of_type.append(record)
    by_statistic = grouped(of_type, lambda record: (record["mode"], str(record.get("of"))))
    found = dict[tuple[str, str], Marks]()
    for statistic, records in by_statistic.items():
        by_curve = grouped(records, lambda record: "".join(place_of(record)))
        found[statistic] = {
            curve: list(map(_mark, of_curve[:MOST_MARKS])) for curve, of_curve in by_curve.items()
        }
    return found


def loss_marks(facts: RunData) -> list[tuple[float, str]]:
    """The marks of the curve of the training loss."""
    spikes = [record for record in facts.trips if record.get("of") == "loss" and record["mode"] == "train"]
    return list(map(_mark, spikes[:MOST_MARKS]))


def _mark(record: Record) -> tuple[float, str]:
    return float(record["step"]), shortened(
        f"{record['hook']}: {record['rule']} {number(record.get('bound'))}"
    )
