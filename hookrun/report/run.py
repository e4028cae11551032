"""The page of a run."""

from __future__ import annotations

from pathlib import Path

from hookrun.report.facts import Facts, read_facts
from hookrun.report.page import write_page
from hookrun.report.sections import OF_A_RUN
from hookrun.report.sections.metrics import latest


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
