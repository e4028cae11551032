"""The runs of a folder as lines of a terminal: one for each, the newest last."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.cells import cell_len, set_cell_size

from hookrun.errors import printable, spec_error
from hookrun.store.objective import preferred
from hookrun.store.runs import COLUMNS, Runs, runs
from hookrun.store.summary import RunSummary, headline

_MOST_NAME = 40
"""Columns of the terminal for the names of runs, unless one of them is longer."""


def chosen_runs(arguments: Sequence[str]) -> Runs:
    """The runs for ``[FOLDER] [KEY=VALUE …]``, where all conditions must hold.

    Raises StoreError for a folder that does not exist, SpecError for a key or a value that no run has.
    """
    words = list(arguments)
    folder = None
    if words and ("=" not in words[0] or os.path.isdir(words[0])):
        folder = words.pop(0)
    conditions: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise spec_error(word, "is not a condition", "after the folder write KEY=VALUE: status=done")
        conditions[key] = value
    return runs(folder).where(conditions)


def columns_of(summary: RunSummary) -> dict[str, Any]:
    """The columns of the table, and the metrics, as data."""
    plain = asdict(summary)
    return {**{name: plain[name] for name in COLUMNS}, "metrics": plain["metrics"]}


def lines_of(chosen: Runs, width: int | None) -> Iterator[str]:
    """A line for each run.

    width: columns of the terminal, to which lines are cut; None: they are not cut
    """
    longest = max((len(summary.name) for summary in chosen.summaries), default=0)
    for summary in reversed(chosen.summaries):
        parts = [f"{summary.name:{min(longest, _MOST_NAME)}}", f"{summary.status:11}", *_said(summary)]
        line = printable("  ".join(filter(None, parts)))
        if width is not None and cell_len(line) > width:
            line = f"{set_cell_size(line, width - 1)}…"
        yield line
    if not chosen:
        yield printable(f"no runs in {chosen.folder}")


def _said(summary: RunSummary) -> Iterator[str]:
    """The metric by which a run is judged, what it did, tags, note, and what went wrong."""
    name = preferred(summary.metrics) or next(iter(summary.metrics), None)
    if name is not None:
        yield f"{name} {summary.metrics[name]:.4g}"
    yield headline(summary)
    if summary.tags:
        yield f"[{', '.join(summary.tags)}]"
    yield from (summary.note, summary.damaged, summary.reason)
