"""Notes for the reader of the page: files that could not be read, captures that ended early."""

from __future__ import annotations

from hookrun.report.draw.text import number
from hookrun.report.facts import Facts
from hookrun.report.section import ReportSection

MOST_SPENT = 200
"""Notes on captures that ended early."""


def _notes(facts: Facts) -> list[str] | None:
    spent = [
        f"{record['hook']} captured nothing after epoch {record['epoch']}, step {record['step']} "
        f"({record['mode']} mode): its max_bytes of {number(record['spent'])} were used up"
        for record in facts.stats.records
        if isinstance(record.get("spent"), int)
    ]
    return [*facts.notes, *spent[:MOST_SPENT]] or None


SECTION = ReportSection("notes", "", _notes, "notes.html")
