"""A notice on jobs of a sweep that are not finished or did not end well."""

from __future__ import annotations

from dataclasses import dataclass

from hookrun.report.section import ReportSection
from hookrun.report.sweep_facts import SweepFacts


@dataclass(frozen=True)
class JobOutcomes:
    """How many jobs are not finished and how many did not end well; the job that ended the sweep, or ""."""

    unfinished: int
    failed: int
    stopped_by: str


def _outcomes(facts: SweepFacts) -> JobOutcomes | None:
    unfinished = facts.counts.get("running", 0) + facts.counts.get("not started", 0)
    return (
        JobOutcomes(unfinished, len(facts.failed), facts.stopped_by) if unfinished or facts.failed else None
    )


SECTION = ReportSection("outcomes", "", _outcomes, "job_outcomes.html")
