"""The page and the table of a sweep."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from hookrun.report.page import write_page
from hookrun.report.sections import OF_A_SWEEP
from hookrun.report.sweep_facts import SweepFacts, read_sweep
from hookrun.store.files import replacing

CSV = "sweep.csv"


def write_sweep_report(folder: Path) -> Path:
    """Write report.html and sweep.csv of the runs below `folder`. StoreError where there are none."""
    facts = read_sweep(folder)
    with replacing(folder / CSV) as file:
        file.write(_csv(facts).encode())
    values = {"title": folder.name, "csv": CSV}
    return write_page(folder, "sweep.html", OF_A_SWEEP, facts, values)


def _csv(facts: SweepFacts) -> str:
    """One line for each job, every number in full."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(
        [
            "job",
            "status",
            "reason",
            "exit_code",
            "started",
            "seconds",
            *facts.keys,
            *facts.metrics,
            "objective",
        ]
    )
    for job in facts.jobs:
        own = [job.name, job.status, job.reason, job.exit_code, job.started, job.seconds]
        swept = [job.overrides.get(key) for key in facts.keys]
        measured = [job.metrics.get(name) for name in facts.metrics]
        writer.writerow([*own, *swept, *measured, job.value])
    return file.getvalue()
