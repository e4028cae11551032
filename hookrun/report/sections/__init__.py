"""The sections of the two pages, in the order of the page. Each is one file, with its template beside it."""

from __future__ import annotations

from hookrun.report.facts import Facts
from hookrun.report.section import ReportSection
from hookrun.report.sections import (
    analysis,
    checks,
    classes,
    failed_jobs,
    generations,
    hooks,
    inactive,
    job_outcomes,
    jobs,
    lens,
    metrics,
    model,
    notes,
    objective,
    outcome,
    parts_of_passes,
    plan,
    repeat,
    summary,
    swept,
)
from hookrun.report.sweep_facts import SweepFacts

OF_A_RUN: tuple[ReportSection[Facts], ...] = (
    outcome.SECTION,
    checks.SECTION,
    inactive.SECTION,
    notes.SECTION,
    summary.SECTION,
    plan.SECTION,
    model.SECTION,
    metrics.SECTION,
    parts_of_passes.SECTION,
    classes.SECTION,
    analysis.SECTION,
    generations.SECTION,
    lens.SECTION,
    hooks.SECTION,
    repeat.OF_A_RUN,
)

OF_A_SWEEP: tuple[ReportSection[SweepFacts], ...] = (
    job_outcomes.SECTION,
    objective.SECTION,
    jobs.SECTION,
    swept.SECTION,
    failed_jobs.SECTION,
    repeat.OF_A_SWEEP,
)
