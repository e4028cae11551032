"""The page of a run, and the page and the table of a sweep."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from hookrun.errors import listed
from hookrun.report.facts import Facts, read_facts
from hookrun.report.jobs import CONFIG, read_yaml
from hookrun.report.page import write_page
from hookrun.report.sections import OF_A_RUN, OF_A_SWEEP
from hookrun.report.sections.metrics import latest
from hookrun.report.sweep_facts import SweepFacts, read_sweep
from hookrun.store.files import replacing


def write_run_report(folder: Path) -> Path:
    """Write the page of the run in `folder`."""
    facts = read_facts(folder)
    values = {"title": _title(facts), "latest": latest(facts)}
    return write_page(folder, "run.html", OF_A_RUN, facts, values)


def _title(facts: Facts) -> str:
    """The name of the experiment, else task and model."""
    words = [str(word).lstrip("+") for word in facts.env.argv]
    named = [word.partition("=")[2] for word in words if word.startswith("experiment=")]
    if named and "," not in named[-1]:
        return named[-1]
    if facts.source:
        return f"{facts.task} of {Path(facts.source).name}"
    return f"{facts.task} {facts.named('model')}".rstrip()


CSV = "sweep.csv"
MOST_KEYS = 4
"""Characters of the title."""


def write_sweep_report(folder: Path) -> Path:
    """Write report.html and sweep.csv of the runs below `folder`. StoreError if there are none."""
    facts = read_sweep(folder)
    with replacing(folder / CSV) as file:
        file.write(_csv(facts).encode())
    values = {"title": _sweep_title(facts), "csv": CSV}
    return write_page(folder, "sweep.html", OF_A_SWEEP, facts, values)


def _sweep_title(facts: SweepFacts) -> str:
    """``clip_fc over hooks.clip_fc.max``: the experiment, or task and model, and the swept keys."""
    named = {job.overrides.get("experiment") for job in facts.compared} - {None}
    what = str(named.pop()) if len(named) == 1 else ""
    if not what and facts.jobs:
        content = read_yaml(facts.folder / facts.jobs[0].name / CONFIG, facts.folder)
        sections = [content.get(each) for each in ("task", "model")] if isinstance(content, dict) else []
        what = " ".join(str(each.get("name", "")) for each in sections if isinstance(each, dict)).strip()
    keys = listed(facts.varied or facts.asked, MOST_KEYS)
    return " over ".join(filter(None, [what or facts.folder.name, keys]))


def _csv(facts: SweepFacts) -> str:
    """One line for each job, with unrounded numbers; if there are baselines, with the difference to its baseline."""
    file = io.StringIO()
    compared = [f"{facts.measure} - baseline"] if facts.measure else []
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
            *compared,
        ]
    )
    for job in facts.jobs:
        own = [job.name, job.status, job.reason, job.exit_code, job.started, job.seconds]
        swept = [job.overrides.get(key) for key in facts.keys]
        measured = [job.metrics.get(name) for name in facts.metrics]
        found = facts.difference(job)
        difference = [None if found is None else found.value][: len(compared)]
        writer.writerow([*own, *swept, *measured, job.value, *difference])
    return file.getvalue()
