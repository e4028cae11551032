"""The page of a folder of runs: `index.html`, one table with search, filters and links, which loads nothing."""

from __future__ import annotations

import html
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from hookrun.errors import counted, shortened
from hookrun.report.draw.text import number
from hookrun.report.pages import made_page, template_text
from hookrun.store.files import MissingFile, StoreError, open_inside, replacing
from hookrun.store.format import MULTIRUN, REPORT, STATUS, SWEEP
from hookrun.store.runs import Runs, hook_lines, runs
from hookrun.store.summary import RunSummary, typed_line

INDEX = "index.html"
MARK = '<meta name="generator" content="hookrun index">'
"""By which the page is known as one that may be replaced."""

MOST_BYTES = 2_900_000
"""Bytes of the rows: the oldest runs are left out of a longer page."""
MOST_METRICS = 8
_MOST_ABOVE = 4
"""How many folders above a run are looked at for a page that lists it."""
_MOST_CELL = 160
_MOST_WIDTH = 36
_LEAST_WIDTH = 7
"""Characters of a column's width."""
_MOST_HEAD = 4_000
"""Bytes read of a page to see whether it is an index."""


@dataclass(frozen=True)
class Column:
    """A column of the table.

    kind: `n` for numbers, `w` for texts that may have several lines
    """

    title: str
    read: Callable[[RunSummary], str]
    kind: str = ""


def index_of(folder: Path) -> Path:
    """Write `index.html` into a folder of runs, and return its path.

    StoreError if there is no run, or if there is another `index.html` that hookrun has not made.
    """
    found = runs(folder)
    page = found.folder / INDEX
    if not found:
        raise StoreError(f"{found.folder} holds no run")
    if os.path.lexists(page) and not is_index(page):
        raise StoreError(
            f"{page} is not a list of runs that hookrun has made: move it away, it is left as it is"
        )
    text = index_page(found)
    with replacing(page, flushes=False, flushes_folder=False) as file:  # it can be made again
        file.write(text.encode("utf-8"))
    return page


def renew_indexes(run: Path) -> None:
    """Write the pages anew that list the run, in the folders above it, where there are some. Raises as `index_of`."""
    for folder in run.parents[:_MOST_ABOVE]:
        if is_index(folder / INDEX):
            index_of(folder)


def is_index(page: Path) -> bool:
    """Whether the file is a page that `index_of` made."""
    try:
        with open_inside(page) as file:
            return MARK.encode() in file.read(_MOST_HEAD)
    except MissingFile:
        return False
    except StoreError:  # a link, or not readable: somebody else's
        return False


def is_collection(folder: Path) -> bool:
    """Whether a folder holds runs of several commands, and is neither a run nor the directory of a sweep.

    The jobs of a sweep are numbered, also where the sweep's own files are gone.
    """
    if any(os.path.lexists(folder / name) for name in (STATUS, MULTIRUN, SWEEP)):
        return False
    names = [path.parent.name for path in folder.glob(f"*/{STATUS}") if not path.parent.is_symlink()]
    if names:
        return not all(map(str.isdecimal, names))
    return any(folder.glob(f"*/*/{STATUS}"))


def index_page(found: Runs) -> str:
    """The page of the runs."""
    metrics = _metrics(found)
    columns = list(_columns(found, metrics[:MOST_METRICS]))
    rows = list[str]()
    size = 0
    for summary in found.summaries:
        row = _row(summary, columns)
        size += len(row.encode()) + 1
        if size > MOST_BYTES:
            break
        rows.append(row)
    notes = list[str]()
    all_of_them = f"all: hookrun.runs({str(found.folder)!r}).table()"
    if len(rows) < len(found):
        notes.append(f"The newest {len(rows):,} of {counted(len(found), 'run')} are shown; {all_of_them}")
    if len(metrics) > MOST_METRICS:
        notes.append(f"{MOST_METRICS} of {len(metrics):,} metrics are shown; {all_of_them}")
    return made_page(
        "index.html",
        script=template_text("index.js"),
        style=Markup("\n").join([template_text("page.css"), template_text("index.css")]),
        mark=Markup(MARK),  # a constant
        folder=found.folder,
        total=len(found),
        counts=Counter(summary.status for summary in found.summaries),
        notes=notes,
        columns=columns,
        widths=" ".join(_width(column, found) for column in columns),
        rows=Markup("\n".join(rows)),  # `_row` escapes every text
    )


def _metrics(found: Runs) -> list[str]:
    """The metrics, those of most runs first."""
    counts = Counter[str]()
    for summary in found.summaries:
        counts.update(summary.metrics.keys())
    return sorted(
        counts, key=lambda name: (-counts[name], name.startswith("train/"), "accuracy" not in name, name)
    )


def _columns(found: Runs, metrics: Sequence[str]) -> list[Column]:
    """The columns of the table, without those that are empty for every run."""
    columns = [
        Column("directory", lambda summary: summary.name),
        Column("status", lambda summary: summary.status),
        Column("experiment", lambda summary: summary.experiment),
        Column("task", lambda summary: summary.task),
        Column("model", lambda summary: summary.model or summary.source),
    ]
    columns += [Column(name, partial(_metric, name), "n") for name in metrics]
    columns += [
        Column("hooks", lambda summary: "; ".join(hook_lines(summary)), "w"),
        Column("typed", typed_line, "w"),
        Column("tags", lambda summary: ", ".join(summary.tags)),
        Column("note", lambda summary: summary.note, "w"),
        Column("reason", lambda summary: summary.damaged or summary.reason, "w"),
        Column("seconds", _seconds, "n"),
        Column("started (UTC)", lambda summary: summary.started[:16].replace("T", " ")),
    ]
    return [column for column in columns if any(map(column.read, found.summaries))]


def _width(column: Column, found: Runs) -> str:
    """The width of a column in CSS, from its longest text; the first one leaves room for others on a phone."""
    longest = max(len(column.read(summary)) for summary in found.summaries)
    letters = max(min(longest, _MOST_WIDTH), len(column.title) + 4, _LEAST_WIDTH)
    return f"min({letters + 2}ch, 38vw)" if column.title == "directory" else f"{letters + 2}ch"


def _metric(name: str, summary: RunSummary) -> str:
    return number(summary.metrics[name]) if name in summary.metrics else ""


def _seconds(summary: RunSummary) -> str:
    return "" if summary.seconds is None else f"{summary.seconds:.1f}"


def _row(summary: RunSummary, columns: Sequence[Column]) -> str:
    """A line of the table. HTML lets the ends of cells and rows be left out, and quotes around short values."""
    cells = ["<tr>"]
    for column in columns:
        text = html.escape(shortened(column.read(summary), _MOST_CELL))
        kind = f" class={column.kind}" if column.kind else ""
        match column.title:
            case "directory":
                text = f'<a href="{_address(summary)}">{text}</a>'
            case "status":
                kind = f' class="s-{text}"'
        cells.append(f"<td{kind}>{text}")
    return "".join(cells)


def _address(summary: RunSummary) -> str:
    """The address of the run's page, or of its directory if it has none."""
    page = REPORT if os.path.isfile(summary.path / REPORT) else ""
    return f"./{quote(summary.name)}/{page}"
