"""The report of a run or a sweep: one page of pictures and tables, made from its directory alone.

A page is a list of sections, in `sections/`. torch is imported when a page is made, not with this package.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hookrun.errors import HookrunError

__all__ = ["try_report", "write_report"]


def write_report(path: str | os.PathLike[str]) -> Path:
    """Write `report.html` into a run directory, or with `sweep.csv` into a directory of runs. Returns the page's path.

    The run or sweep may still be running. Raises StoreError if the directory holds neither, or if the page can't be
    written.
    """
    from hookrun.report.pages import write_run_report, write_sweep_report
    from hookrun.store.format import STATUS

    folder = Path(path).expanduser().resolve()
    return write_run_report(folder) if os.path.isfile(folder / STATUS) else write_sweep_report(folder)


def try_report(path: Path) -> Path | None:
    """As `write_report`; if that fails, which must not affect the run, print why and how to make it later: None."""
    try:
        return write_report(path)
    except Exception as error:
        message = str(error) if isinstance(error, HookrunError) else f"{type(error).__name__}: {error}"
        later = f"  to make it later: python -m hookrun.report {path}"
        print(f"report: not made: {message}\n{later}", file=sys.stderr, flush=True)
        return None
