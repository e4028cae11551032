"""Rules that tripped: what a page's first line says of them, and the marks that curves get."""

from __future__ import annotations

from hookrun.errors import counted, listed, shortened
from hookrun.report.curves import Mark, Record, place_of
from hookrun.report.draw.text import number
from hookrun.report.facts import RunData

_SHOWN = 3
_WORD = 30


def trips_line(facts: RunData) -> str:
    """``2 rules tripped: spike, dead``, the first one to trip first; ``""`` if none has."""
    rules = dict.fromkeys(shortened(record["hook"], _WORD) for record in facts.trips)
    if not rules:
        return ""
    return f"{counted(len(rules), 'rule')} tripped: {listed(rules, _SHOWN)}"


def marks_on(hook_type: str | None, facts: RunData) -> dict[tuple[str, str], dict[str, list[Mark]]]:
    """Mode and statistic -> name of a curve of hooks of a type -> the marks that rules of this type set on it."""
    marks: dict[tuple[str, str], dict[str, list[Mark]]] = {}
    for record in facts.trips:
        rule = facts.planned.get(record["hook"])
        if rule is not None and rule.hook == hook_type:
            of_statistic = marks.setdefault((record["mode"], str(record.get("of"))), {})
            of_statistic.setdefault("".join(place_of(record)), []).append(mark(record))
    return marks


def mark(record: Record) -> Mark:
    """The step at which a rule tripped, and which rule."""
    rule = f"{record['hook']}: {record['rule']} {number(record.get('bound'))}"
    return float(record["step"]), shortened(rule)
