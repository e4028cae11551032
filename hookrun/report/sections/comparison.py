"""The results of task=compare: where two runs differ first, the differences by module, and what else differs."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from typing import Any

import numpy as np

from hookrun.report.draw.charts import Figure, bars
from hookrun.report.draw.pictures import heat
from hookrun.report.draw.text import module_name, number, shortened
from hookrun.report.facts import Facts
from hookrun.store.files import StoreError, os_errors
from hookrun.store.format import COMPARE_CSV, COMPARE_JSON
from hookrun.store.inside import is_there, read_inside
from hookrun.store.records import ComparisonRecord, typed_record

MOST_ROWS = 400
"""The rows of each table, the modules and the tokens of a picture."""

MOST_JOBS = 50
_MOST_BYTES = 2**25
_CAPTURE = ("hook", "module", "path", "token")
_NUMBERS = (
    "rows",
    "cosine",
    "relative_l2",
    "largest",
    "largest_sample",
    "largest_token",
    "nans",
    "nans_other",
    "cka",
)
_TABLES = ("metrics", "weights", "statistics", "plan", "config")

Row = Mapping[str, Any]


def build(facts: Facts) -> dict[str, Any] | None:
    """The parts of the section, one for each job of two sweeps; None if the run compared nothing.

    problem: why the files cannot be read
    """
    if not is_there(facts.path / COMPARE_JSON):
        return None
    try:
        record = typed_record(facts.path / COMPARE_JSON, ComparisonRecord)
        path = facts.path / COMPARE_CSV
        with os_errors(f"cannot read {path}"):
            text = read_inside(path, limit=_MOST_BYTES).decode("utf-8", errors="replace")
        rows = list(csv.DictReader(StringIO(text)))
    except (StoreError, csv.Error) as error:
        return {"problem": str(error), "reasons": [], "parts": []}
    jobs = dict(list(record.jobs.items())[:MOST_JOBS]) or {"": record}
    parts = [
        _part(job, each, [row for row in rows if row.get("job", "") == job]) for job, each in jobs.items()
    ]
    return {"problem": "", "reasons": record.reasons, "parts": parts}


def _part(job: str, record: ComparisonRecord, rows: Sequence[Row]) -> dict[str, Any]:
    """The picture and the tables of two runs."""
    shown = [
        [*(row.get(key) or "" for key in _CAPTURE), *map(number, _numbers(row)), row.get("note") or ""]
        for row in rows[:MOST_ROWS]
    ]
    changes = record.predictions.get("changes")
    tables = [_table("captures", [*_CAPTURE, *_NUMBERS, "note"], shown)]
    tables += [_of_dicts(f"captures of one run only ({len(record.unpaired)})", record.unpaired)]
    tables += [_of_dicts("changed predictions", changes if isinstance(changes, list) else ())]
    tables += [_of_dicts(name, getattr(record, name)) for name in _TABLES]
    facts = [
        f"{key}: {number(record.predictions.get(key))}"
        for key in ("compared", "changed", "kl", "relative_l2")
    ]
    return {
        "job": job,
        "runs": (record.run, record.other),
        "predictions": ", ".join(facts) if record.predictions.get("compared") else "",
        "weights_of": record.weights_of,
        "figures": _figures(rows),
        "tables": [table for table in tables if table["rows"]],
    }


def _numbers(row: Row) -> list[float | None]:
    found = list[float | None]()
    for key in _NUMBERS:
        try:
            found.append(float(row[key]))
        except (KeyError, TypeError, ValueError):
            found.append(None)
    return found


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> dict[str, Any]:
    cells = [[shortened(number(cell), 200) for cell in row] for row in rows]
    return {"title": title, "heads": heads, "rows": cells}


def _of_dicts(title: str, rows: Sequence[Any]) -> dict[str, Any]:
    """A table of the first mappings of a list, with a column for each key."""
    known = [row for row in rows if isinstance(row, Mapping)][:MOST_ROWS]
    heads = list(dict.fromkeys(str(key) for row in known for key in row))
    return _table(title, heads, [[row.get(head, "") for head in heads] for row in known])


def _figures(rows: Sequence[Row]) -> list[Figure]:
    """The relative L2 of each module in the order of execution: bars, or a map by token."""
    place = _NUMBERS.index("relative_l2")
    cells = dict[tuple[str, str], float]()
    for row in rows:
        name = module_name(str(row.get("module") or "")) + (f" {row['path']}" if row.get("path") else "")
        value = _numbers(row)[place]
        if value is not None:
            cells.setdefault((name, str(row.get("token") or "")), value)
    names = list(dict.fromkeys(name for name, _ in cells))[:MOST_ROWS]
    tokens = sorted({token for _, token in cells if token.isdecimal()}, key=int)[:MOST_ROWS]
    if not names:
        return []
    title = "relative L2 of the difference, in the order of execution"
    if not tokens:
        return [
            bars(
                title,
                [cells.get((name, ""), math.nan) for name in names],
                x="module",
                y="relative L2",
                names=names,
            )
        ]
    values = np.array([[cells.get((name, token), math.nan) for token in tokens] for name in names])
    values = values.clip(0, 1e30).astype(np.float32)
    return [heat(title, values, rows=names, columns=tokens, x="position of the token", log=True)]
