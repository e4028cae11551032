"""Rules that tripped: what a page's first line says of them, and the marks that curves get."""

from __future__ import annotations

from hookrun.errors import counted, listed, shortened
from hookrun.report.curves import Mark, Record, place_of
from hookrun.report.draw.text import number
from hookrun.report.facts import RunData
from hookrun.store.records import grouped

_SHOWN = 3
_WORD = 30
_ENDING = ("error", "stop")
"""Policies that end the run."""


def trips_line(facts: RunData) -> str:
    """``2 rules tripped: spike, dead``; ``""`` if none has.

    The worst come first: those that ended the run, then those that tripped at the most modules.
    """
    rules = grouped(facts.trips, lambda record: record["hook"])
    if not rules:
        return ""

    def badness(name: str) -> tuple[bool, int]:
        return rules[name][0].get("policy") in _ENDING, len(grouped(rules[name], place_of))

    worst = [shortened(name, _WORD) for name in sorted(rules, key=badness, reverse=True)]
    return f"{counted(len(rules), 'rule')} tripped: {listed(worst, _SHOWN)}"


def marks_by_curve(facts: RunData) -> dict[tuple[str | None, str, str, str], list[Mark]]:
    """Hook type, mode, statistic and name of a curve -> the marks from rules on it in hooks of this type."""
    marks = dict[tuple[str | None, str, str, str], list[Mark]]()
    for record in facts.trips:
        planned = facts.planned.get(record["hook"])
        hook_type = planned.hook if planned is not None else None
        key = hook_type, record["mode"], str(record.get("of")), "".join(place_of(record))
        marks.setdefault(key, []).append(mark(record))
    return marks


def mark(record: Record) -> Mark:
    """The step at which a rule tripped, and which rule."""
    rule = f"{record['hook']}: {record['rule']} {number(record.get('bound'))}"
    return float(record["step"]), shortened(rule)
