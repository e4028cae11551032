"""The report of a run or a sweep: one page of pictures and tables, made from its directory alone.

A page is a list of sections, in `sections/`. torch is imported when a page is made, not with this package.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hookrun.errors import HookrunError

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

    Raises StoreError if the page can't be written, or is not one that hookrun has made.
    """
    from hookrun.report.index import index_of, is_collection

    folder = Path(path).expanduser().resolve()
    return index_of(folder) if is_collection(folder) else None


def try_report(path: Path) -> Path | None:
    """As `write_report`; if that fails, which must not affect the run, print why and how to make it later: None."""
    again = f"python -m hookrun.report {path}"
    try:
        page = write_report(path)
    except Exception as error:
        _tell_failure("report", error, again)
        return None
    try:
        from hookrun.report.index import renew_indexes

        renew_indexes(page.parent)
    except Exception as error:
        _tell_failure("index.html", error, "python -m hookrun.report FOLDER")
    return page


def _tell_failure(what: str, error: Exception, later: str) -> None:
    message = str(error) if isinstance(error, HookrunError) else f"{type(error).__name__}: {error}"
    print(f"{what}: not made: {message}\n  to make it later: {later}", file=sys.stderr, flush=True)
