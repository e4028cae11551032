"""The page and the table of a sweep."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from pathlib import Path
from typing import Any

from hookrun.report.jobs import Job, asked_for, find_jobs, metric_names, swept_keys
from hookrun.report.page import write_page
from hookrun.report.repeat import repeat_sweep
from hookrun.report.sweep_plots import sweep_figures
from hookrun.store.files import StoreError, replacing

CSV = "sweep.csv"
_ORDER = ("running", "cut off", "failed", "stopped", "interrupted", "not started", "done")
_UNLUCKY = ("cut off", "failed", "stopped", "interrupted", "unreadable")


def write_sweep_report(folder: Path) -> Path:
    """Write report.html and sweep.csv of the runs below `folder`. StoreError where there are none."""
    if not folder.is_dir():
        raise StoreError(f"there is no folder {folder}")
    jobs = find_jobs(folder)
    if not jobs:
        raise StoreError(f"{folder} holds no run: no directory in it has a status.json")
    asked = asked_for(folder)
    varied, metrics = swept_keys(jobs), metric_names(jobs)
    given = {key for job in jobs for key in job.overrides}
    keys = list(dict.fromkeys([*(key for key in asked if key in given), *varied]))
    with replacing(folder / CSV) as file:
        file.write(_csv(jobs, keys, metrics).encode())
    counts = Counter(job.status for job in jobs)
    counts["not started"] += max(math.prod(asked.values()) - len(jobs), 0) if asked else 0
    values: dict[str, Any] = {
        "title": folder.name,
        "folder": folder,
        "jobs": jobs,
        "keys": keys,
        "metrics": metrics,
        "counts": [(status, counts[status]) for status in _ORDER if counts[status]],
        "unlucky": [job for job in jobs if job.status in _UNLUCKY],
        "unfinished": counts["running"] + counts["not started"],
        "figures_of": sweep_figures(jobs, varied, metrics),
        "repeat": repeat_sweep(folder, next((job.argv for job in jobs if job.argv), [])),
        "csv": CSV,
    }
    return write_page(folder, "sweep.html", values)


def _csv(jobs: list[Job], keys: list[str], metrics: list[str]) -> str:
    """One line for each job, every number in full."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["job", "status", "reason", "exit_code", "started", "seconds", *keys, *metrics])
    for job in jobs:
        writer.writerow(
            [
                job.name, job.status, job.reason, job.exit_code, job.started, job.seconds,
                *(job.overrides.get(key) for key in keys), *(job.metrics.get(name) for name in metrics),
            ]
        )  # fmt: skip
    return file.getvalue()
