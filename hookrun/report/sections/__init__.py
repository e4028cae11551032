"""The sections of the two pages, in the order of the page; each has its template in this folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar

from hookrun.report.facts import Facts
from hookrun.report.sections import (
    analysis,
    attribution,
    classes,
    comparison,
    effects,
    generations,
    hooks,
    lens,
    metrics,
    model,
    notices,
    parts_of_passes,
    plan,
    repeat,
    summary,
    swept,
)
from hookrun.report.sweep_facts import SweepFacts

F = TypeVar("F")


@dataclass(frozen=True)
class ReportSection(Generic[F]):
    """One part of a page.

    id:       the section's anchor in the page
    title:    its entry in the navigation; "" for a notice without an entry
    build:    facts of the run or the sweep -> `data` of the template; None or an empty list leaves the section out
    template: a file in `sections/`, which may use `section`, `data`, `facts` and the macros of parts.html
    """

    id: str
    title: str
    build: Callable[[F], Any | None]
    template: str


OF_A_RUN: tuple[ReportSection[Facts], ...] = (
    ReportSection("outcome", "", notices.outcome, "outcome.html"),
    ReportSection("checks", "", notices.failed_checks, "checks.html"),
    ReportSection("inactive", "", notices.inactive_hooks, "inactive.html"),
    ReportSection("notes", "", notices.notes, "notes.html"),
    ReportSection("summary", "Summary", summary.build, "summary.html"),
    ReportSection("plan", "Plan", plan.build, "plan.html"),
    ReportSection("model", "Model", model.build, "model.html"),
    ReportSection("metrics", "Metrics", metrics.build, "metrics.html"),
    ReportSection("parts", "By position and sample", parts_of_passes.build, "parts_of_passes.html"),
    ReportSection("classes", "Classes", classes.build, "classes.html"),
    ReportSection("analysis", "Analysis", analysis.build, "analysis.html"),
    ReportSection("attribution", "Attribution", attribution.build, "attribution.html"),
    ReportSection("comparison", "Comparison", comparison.build, "comparison.html"),
    ReportSection("generations", "Generations", generations.build, "generations.html"),
    ReportSection("lens", "Lens", lens.build, "lens.html"),
    ReportSection("effects", "Effects", effects.build, "effects.html"),
    ReportSection("hooks", "Hooks", hooks.build, "hooks.html"),
    ReportSection("repeat", "Run it again", repeat.of_a_run, "repeat.html"),
)

OF_A_SWEEP: tuple[ReportSection[SweepFacts], ...] = (
    ReportSection("outcomes", "", attrgetter("has_notice"), "job_outcomes.html"),
    ReportSection("objective", "Objective", swept.objective, "objective.html"),
    ReportSection("jobs", "Jobs", attrgetter("ranked"), "jobs.html"),
    ReportSection("figures", "Metrics by swept key", swept.figures, "swept.html"),
    ReportSection("failed", "Failures", attrgetter("failed"), "failed_jobs.html"),
    ReportSection("repeat", "Run it again", repeat.of_a_sweep, "repeat.html"),
)
