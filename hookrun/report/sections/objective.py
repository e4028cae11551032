"""The objective of the sweep, and the best job."""

from __future__ import annotations

from typing import Any

from hookrun.report.section import ReportSection
from hookrun.report.sweep_facts import SweepFacts


def _objective(facts: SweepFacts) -> dict[str, Any] | None:
    """The objective as text, how many jobs are done without a finite value, and the metrics of single batches."""
    of_batch = sorted({name for job in facts.jobs for name in job.of_batch})
    objective = str(facts.goal) if facts.goal else ""
    if len(facts.goals) > 1:
        objective = "not the same for every job: " + "; ".join(sorted(map(str, facts.goals)))
    if not objective and not of_batch:
        return None
    without = sum(job.result is not None and job.value is None for job in facts.jobs) if facts.goal else 0
    return {"objective": objective, "without": without, "of_batch": of_batch}


SECTION = ReportSection("objective", "Objective", _objective, "objective.html")
