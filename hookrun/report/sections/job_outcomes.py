"""A notice on jobs of a sweep that are not finished or did not end well."""

from __future__ import annotations

from hookrun.report.section import ReportSection
from hookrun.report.sweep_facts import SweepFacts


def _unfinished(facts: SweepFacts) -> int | None:
    """How many jobs are running or not started; None if all have ended well."""
    unfinished = facts.counts.get("running", 0) + facts.counts.get("not started", 0)
    return unfinished if unfinished or facts.failed else None


SECTION = ReportSection("outcomes", "", _unfinished, "job_outcomes.html")
