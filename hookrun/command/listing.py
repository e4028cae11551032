"""The runs of a folder as lines of a terminal: one for each, the newest last."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size

from hookrun.errors import counted, printable, spec_error
from hookrun.store.objective import preferred
from hookrun.store.runs import COLUMNS, Runs, runs
from hookrun.store.summary import RunSummary, headline

_MOST_NAME = 40
"""Columns of the terminal for the names of runs, unless one of them is longer."""


def listed_runs(arguments: Sequence[str], width: int | None, told: dict[str, Any]) -> Iterator[str]:
    """The lines for ``[FOLDER] [KEY=VALUE …]``, where all conditions must hold.

    width: columns of the terminal, to which lines are cut; None: they are not cut
    told:  gets the runs as data, the newest first

    Raises StoreError for a folder that does not exist, SpecError for a key or a value that no run has.
    """
    folder, conditions = _read(arguments)
    found = runs(folder)
    chosen = found.where(conditions)
    told["runs"] = list(map(_as_data, chosen.summaries))
    if not chosen:
        those = f"none of {counted(len(found), 'run')} in" if len(found) else "there are no runs in"
        yield printable(f"{those} {found.folder}{' fits' if len(found) else ''}")
    yield from _lines(chosen, width)


def _as_data(summary: RunSummary) -> dict[str, Any]:
    """The columns of the table, and the metrics."""
    columns = {name: read(summary) for name, read in COLUMNS.items()}
    return {**columns, "metrics": summary.metrics}


def _read(arguments: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """The folder, None if none is named, and the conditions. Raises SpecError for what is neither."""
    words = list(arguments)
    folder = None
    if words and ("=" not in words[0] or os.path.isdir(words[0])):
        folder = words.pop(0)
    conditions = dict[str, str]()
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise spec_error(word, "is not a condition", "after the folder write KEY=VALUE: status=done")
        if key in conditions:
            raise spec_error(word, f"{key} has two values", "give one of them")
        conditions[key] = value
    return folder, conditions


def _lines(chosen: Runs, width: int | None) -> Iterator[str]:
    names = [printable(summary.name) for summary in chosen.summaries]
    width_of_names = min(max(map(cell_len, names), default=0), _MOST_NAME)
    width_of_states = max((len(printable(summary.status)) for summary in chosen.summaries), default=0)
    for name, summary in zip(reversed(names), reversed(chosen.summaries), strict=True):
        cells = [
            _padded(name, width_of_names),
            printable(summary.status).ljust(width_of_states),
            *_said(summary),
        ]
        line = "  ".join(filter(None, cells)).rstrip()
        if width is not None and cell_len(line) > width:
            line = f"{set_cell_size(line, width - 1).rstrip()}…"
        yield line


def _padded(text: str, width: int) -> str:
    return text + " " * max(width - cell_len(text), 0)


def _said(summary: RunSummary) -> Iterator[str]:
    """The metric by which a run is judged, what it did, tags, note, and what went wrong."""
    name = preferred(summary.metrics) or next(iter(summary.metrics), None)
    if name is not None:
        yield printable(f"{name} {summary.metrics[name]:.4g}")
    yield headline(summary)
    if summary.tags:
        yield printable(f"[{', '.join(summary.tags)}]")
    yield printable(summary.note)
    yield printable(summary.damaged or summary.reason)
