"""The report of a run or a sweep: one page of pictures and tables, made from its directory alone.

A page is a list of sections, in `sections/`. torch is imported when a page is made, not with this package.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hookrun.errors import HookrunError
from hookrun.store.format import JOB

T = TypeVar("T")

__all__ = ["try_report", "write_index", "write_report"]


def write_report(path: str | os.PathLike[str]) -> Path:
    """Write `report.html` into a run directory, or with `sweep.csv` into a directory of runs. Returns the page's path.

    The run or sweep may still be running. Raises StoreError if the directory holds neither, or if the page can't be
    written.
    """
    from hookrun.report.pages import write_run_report, write_sweep_report
    from hookrun.store.format import STATUS

    folder = Path(path).expanduser().resolve()
    return write_run_report(folder) if os.path.isfile(folder / STATUS) else write_sweep_report(folder)


def write_index(path: str | os.PathLike[str]) -> Path | None:
    """Write `index.html`, a table of the runs, into a folder of them. Returns its path; None for a run or a sweep.

    Raises StoreError if the page can't be written, or would replace one that hookrun has not made.
    """
    from hookrun.report import index

    folder = Path(path).expanduser().resolve()
    return index.write_index(folder) if index.is_collection(folder) else None


def try_report(path: Path) -> Path | None:
    """As `write_report`; if that fails, which must not affect the run, print why and how to make it later: None.

    The pages `index.html` that list it are written again, unless it is a job: its sweep does that.
    """
    page = _tried("report", write_report, path)
    if page is not None and not os.path.lexists(path / JOB):
        from hookrun.report import index

        for folder in index.indexed_above(page.parent):
            _tried("index.html", index.write_index, folder)
    return page


def _tried(what: str, write: Callable[[Path], T], path: Path) -> T | None:
    try:
        return write(path)
    except Exception as error:
        message = str(error) if isinstance(error, HookrunError) else f"{type(error).__name__}: {error}"
        later = f"  to make it later: python -m hookrun.report {path}"
        print(f"{what}: not made: {message}\n{later}", file=sys.stderr, flush=True)
        return None
