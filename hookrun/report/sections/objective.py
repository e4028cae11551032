"""The objective of the sweep, and the best job."""

from __future__ import annotations

from dataclasses import dataclass

from hookrun.report.jobs import JobFacts
from hookrun.report.section import ReportSection
from hookrun.report.sweep_facts import SweepFacts


@dataclass(frozen=True)
class Best:
    """The objective as text, and the best job that is done.

    without: number of jobs that are done but have no finite value
    of_batch: metrics of which at least one job logged single batches only
    """

    objective: str
    job: JobFacts | None
    without: int
    of_batch: list[str]


def _best(facts: SweepFacts) -> Best | None:
    of_batch = sorted({name for job in facts.jobs for name in job.of_batch})
    if len(facts.goals) > 1:
        words = "not the same for every job: " + "; ".join(sorted(map(str, facts.goals)))
        return Best(words, None, 0, of_batch)
    if not facts.goals:
        return Best("", None, 0, of_batch) if of_batch else None
    without = sum(job.result is not None and job.result.value is None for job in facts.jobs)
    return Best(str(facts.goals[0]), facts.best, without, of_batch)


SECTION = ReportSection("objective", "Objective", _best, "objective.html")
