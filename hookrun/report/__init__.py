"""The report of a run or a sweep: one page of pictures and tables, made from its directory alone.

A page is a list of sections, in `sections/`. torch is imported when a page is made, not with this package.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_report"]


def write_report(path: str | os.PathLike[str]) -> Path:
    """Write `report.html` into a run directory, or with `sweep.csv` into a directory of runs. Returns the page's path.

    The run or sweep may still be running. Raises StoreError if the directory holds neither, or if the page can't be
    written.
    """
    from hookrun.store.format import STATUS

    folder = Path(path).expanduser().resolve()
    if (folder / STATUS).is_file():
        from hookrun.report.run import write_run_report

        return write_run_report(folder)
    from hookrun.report.sweep import write_sweep_report

    return write_sweep_report(folder)
