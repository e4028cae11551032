"""The jobs of a sweep that did not end well, with the reasons."""

from __future__ import annotations

from hookrun.report.jobs import JobFacts
from hookrun.report.section import ReportSection
from hookrun.report.sweep_facts import SweepFacts


def _failed(facts: SweepFacts) -> list[JobFacts] | None:
    return facts.failed or None


SECTION = ReportSection("failed", "Failures", _failed, "failed_jobs.html")
