"""The table of a sweep's jobs, baselines and the best job first, which the page sorts and filters."""

from __future__ import annotations

from collections.abc import Sequence

from hookrun.report.jobs import JobFacts
from hookrun.report.section import ReportSection
from hookrun.report.sweep_facts import SweepFacts


def _jobs(facts: SweepFacts) -> Sequence[JobFacts]:
    return facts.ranked


SECTION = ReportSection("jobs", "Jobs", _jobs, "jobs.html")
