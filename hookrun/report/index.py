"""The page of a folder of runs: `index.html`, one table with search, filters and links, which loads nothing."""

from __future__ import annotations

import html
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from hookrun.errors import counted, shortened
from hookrun.report.draw.text import number
from hookrun.report.pages import made_page, template_text
from hookrun.store.files import StoreError, open_inside, replacing
from hookrun.store.format import MULTIRUN, REPORT, STATUS, SWEEP
from hookrun.store.runs import Runs, cell_of, runs
from hookrun.store.summary import RunSummary

INDEX = "index.html"
MARK = '<meta name="generator" content="hookrun index">'
"""By which the page is known as one that may be replaced."""

MOST_BYTES = 2_900_000
"""Bytes of the rows: the oldest runs are left out of a longer page."""
MOST_METRICS = 8
_MOST_ABOVE = 4
"""How many folders above a run are looked at for a page that lists it."""
_MOST_READ = 5
"""How often the runs are read, at most, if other processes write the page meanwhile."""
_MOST_CELL = 160
_WIDTH = 56
"""Most characters of a cell, and of the width of a column."""

_BEFORE_METRICS = ("name", "status", "experiment", "task", "model")
_WRAPPED = ("hooks", "overrides", "note", "reason", "damaged")
_TITLES = {"duration": "duration (s)", "started": "started (UTC)"}
_AFTER_METRICS = (*_WRAPPED[:3], "tags", *_WRAPPED[3:], "duration", "started")


def write_index(folder: Path) -> Path:
    """Write `index.html` into a folder of runs, and return its path.

    The runs are read again if another process has written the page meanwhile, since that one may have read them later.

    StoreError if there is another `index.html` that hookrun has not made.
    """
    page = folder.resolve() / INDEX
    if os.path.lexists(page) and not is_index(page):
        raise StoreError(f"{page} is left as it is, since hookrun has not made it: move it away")
    for _ in range(_MOST_READ):
        version = _version_of(page)
        text = index_page(runs(page.parent))
        if _version_of(page) == version:
            break
    with replacing(page, flushes=False, flushes_folder=False) as file:  # it can be made again
        file.write(text.encode("utf-8"))
    return page


def _version_of(page: Path) -> tuple[int, int] | None:
    """Another one after each writing of the page; None if there is no page."""
    with suppress(OSError):
        info = os.stat(page)
        return info.st_ino, info.st_mtime_ns
    return None


def indexed_above(run: Path) -> list[Path]:
    """The folders above a run or a sweep that have a page, which lists it too."""
    return [folder for folder in run.parents[:_MOST_ABOVE] if is_index(folder / INDEX)]


def is_index(page: Path) -> bool:
    """Whether the file is a page that `write_index` made."""
    try:
        with open_inside(page) as file:
            return MARK.encode() in file.read(4_000)
    except StoreError:  # there is none; or a link, which is somebody else's
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
    """The page of the runs, without the columns that are empty."""
    metrics = found.metrics
    kinds = dict.fromkeys(_WRAPPED, "w") | dict.fromkeys([*metrics, "duration"], "n")
    columns: dict[str, list[str]] = {}
    widths: dict[str, int] = {}
    for key in [*_BEFORE_METRICS, *metrics[:MOST_METRICS], *_AFTER_METRICS]:
        texts = [shortened(_text(summary, key), _MOST_CELL) for summary in found.summaries]
        if any(texts):
            columns[key] = texts
            widths[key] = max(min(max(map(len, texts)), _WIDTH), len(key) + 4) + 2
    rows: list[str] = []
    size = 0
    for summary, *cells in zip(found.summaries, *columns.values(), strict=True):
        row = _row(summary, dict(zip(columns, cells, strict=True)), kinds)
        size += len(row.encode()) + 1
        if size > MOST_BYTES:
            break
        rows.append(row)
    notes: list[str] = []
    in_python = f"all: hookrun.runs({str(found.folder)!r}).table()"
    if len(rows) < len(found):
        notes.append(f"The newest {len(rows):,} of {counted(len(found), 'run')} are shown; {in_python}")
    if len(metrics) > MOST_METRICS:
        notes.append(f"{MOST_METRICS} of {len(metrics):,} metrics are shown; {in_python}")
    return made_page(
        "index.html",
        script=template_text("index.js"),
        style=Markup("\n").join([template_text("page.css"), template_text("index.css")]),
        mark=Markup(MARK),  # a constant
        found=found,
        counts=Counter(summary.status for summary in found.summaries),
        notes=notes,
        columns=columns,
        titles={key: _TITLES.get(key, key) for key in columns},
        kinds=kinds,
        widths=widths,
        rows=Markup("\n".join(rows)),  # `_row` escapes every text
    )


def _text(summary: RunSummary, key: str) -> str:
    if key == "started":
        return summary.started[:19].replace("T", " ")
    value = cell_of(summary, key)
    return "" if value is None else number(value)


def _row(summary: RunSummary, cells: Mapping[str, str], kinds: Mapping[str, str]) -> str:
    """A line of the table. HTML lets the ends of cells and rows be left out, and quotes around short values."""
    page = REPORT if os.path.isfile(summary.directory / REPORT) else ""
    line = "<tr>"
    for key, text in cells.items():
        text = html.escape(text)
        match key:
            case "name":
                line += f'<td><a href="./{quote(os.fsencode(summary.name))}/{page}">{text}</a>'
            case "status":
                line += f'<td class="s-{text}">{text}'
            case _:
                line += f"<td class={kinds[key]}>{text}" if key in kinds else f"<td>{text}"
    return line
