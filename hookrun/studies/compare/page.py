"""The results of task=compare: where two runs differ first, the differences by module, and what else differs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from hookrun.errors import shortened
from hookrun.studies.compare.records import COMPARE_JSON, Comparison
from hookrun.studies.kit.drawing import (
    MOST_ROWS,
    Figure,
    HeatMap,
    RunData,
    bars,
    is_number,
    matrix,
    module_name,
    number,
)
from hookrun.studies.kit.files import StoreError
from hookrun.studies.kit.record_types import typed_record

ID = "comparison"
TITLE = "Comparison"
POSITION = 30

MOST_JOBS = 50
_TABLES = ("captures", "names", "unpaired", "metrics", "weights", "statistics", "plan", "config")


def build(facts: RunData) -> dict[str, Any] | None:
    """The parts of the section, one for each job of two sweeps; None if the run compared nothing.

    problem: why the file cannot be read
    """
    if not os.path.lexists(facts.path / COMPARE_JSON):
        return None
    try:
        record = typed_record(facts.path / COMPARE_JSON, Comparison)
    except StoreError as error:
        return {"problem": str(error), "reasons": [], "parts": []}
    jobs = list(record.jobs.items())[:MOST_JOBS] or [("", record)]
    parts = [_part(job, of_job) for job, of_job in jobs]
    return {"problem": "", "reasons": record.reasons, "parts": parts}


def _part(job: str, record: Comparison) -> dict[str, Any]:
    """The picture and the tables of two runs."""
    predictions = dict(record.predictions)
    changes = predictions.pop("changes", None)
    tables = [_table(name, getattr(record, name)) for name in _TABLES]
    tables.append(_table("predictions", [predictions]))
    if isinstance(changes, list):
        tables.append(_table("changed predictions", [row for row in changes if isinstance(row, Mapping)]))
    return {
        "job": job,
        "runs": (record.run, record.other),
        "weights_of": record.weights_of,
        "figures": _figures(record.captures),
        "tables": [table for table in tables if table["rows"]],
    }


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A table of the first rows, with a column for each key."""
    shown = rows[:MOST_ROWS]
    heads = list(dict.fromkeys(chain(*shown)))
    cells: list[list[str]] = []
    for row in shown:
        cells.append([shortened(number(row.get(head, "")), 200) for head in heads])
    return {"title": title, "heads": heads, "rows": cells}


def _figures(rows: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """The relative L2 of each module in the order of execution: bars, or a map by token."""
    cells: dict[tuple[str, int | None], float] = {}
    for row in rows:
        if not is_number(row.get("relative_l2")):
            continue
        name = f"{module_name(str(row.get('module')))} {row.get('path') or ''}".rstrip()
        token = row.get("token")
        place = (name, token if isinstance(token, int) else None)
        cells.setdefault(place, max(float(row["relative_l2"]), 0.0))
    names = list(dict.fromkeys(name for name, _ in cells))[:MOST_ROWS]
    tokens = sorted({token for _, token in cells if token is not None})[:MOST_ROWS]
    title = "relative L2 of the difference, in the order of execution"
    if not names:
        return []
    if not tokens:
        heights = [cells[name, None] for name in names]
        return [bars(title, heights, x="module", y="relative L2", names=names)]
    columns = list(map(str, tokens))
    values = matrix(cells, names, tokens)
    return [HeatMap(title, values, rows=names, columns=columns, x="token", log=True).figure()]
