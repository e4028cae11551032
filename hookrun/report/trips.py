"""Rules that tripped: what a page's first line says of them, and the marks that curves get."""

from __future__ import annotations

from hookrun.errors import counted, shortened
from hookrun.report.curves import MOST_MARKS, Mark, Record, place_of
from hookrun.report.draw.text import module_name, number
from hookrun.report.facts import RunData
from hookrun.store.records import grouped

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


def marks_by_type(facts: RunData) -> dict[str | None, dict[tuple[str, str], dict[str, list[Mark]]]]:
    """Hook type -> (mode, statistic) -> name of a curve -> the marks from rules in hooks of this type."""
    found = dict[str | None, dict[tuple[str, str], dict[str, list[Mark]]]]()
    for record in facts.trips:
        planned = facts.planned.get(record["hook"])
        if planned is not None:
            of_type = found.setdefault(planned.hook, {})
            of_statistic = of_type.setdefault((record["mode"], str(record.get("of"))), {})
            of_statistic.setdefault("".join(place_of(record)), []).append(_mark(record))
    return found


def loss_marks(facts: RunData) -> list[Mark]:
    """The marks of the curve of the training loss."""
    spikes = [record for record in facts.trips if record.get("of") == "loss" and record["mode"] == "train"]
    return list(map(_mark, spikes[:MOST_MARKS]))


def _mark(record: Record) -> Mark:
    return float(record["step"]), shortened(
        f"{record['hook']}: {record['rule']} {number(record.get('bound'))}"
    )
