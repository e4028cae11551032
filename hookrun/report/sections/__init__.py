"""The sections of the two pages; each has its template in this folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from operator import attrgetter
from typing import Any, Generic, Literal, TypeVar, get_args

from hookrun.engine.discovery import extension_modules, modules_named, taken
from hookrun.errors import listed, spec_error
from hookrun.report.facts import RunData
from hookrun.report.sections import (
    classes,
    depth,
    folds,
    hooks,
    metrics,
    model,
    notices,
    plan,
    repeat,
    summary,
    swept,
)
from hookrun.report.sweep_facts import SweepData
from hookrun.store.studies import STUDIES

F = TypeVar("F")

Place = Literal["notice", "numbers", "answer", "details"]
"""The parts of a page from top to bottom: what went wrong, the numbers, what was asked for, and the rest, folded."""


@dataclass(frozen=True)
class ReportSection(Generic[F]):
    """One part of a page.

    id:       the section's anchor in the page
    title:    its entry in the navigation; "" for a notice without an entry
    build:    facts of the run or the sweep -> `data` of the template; None or an empty list leaves the section out
    template: a file in `sections/`, or of an extension `package:file`, a file beside its modules; it may use
              `section`, `data`, `facts` and the macros of parts.html
    place:    its part of the page; within a part, sections have the order of the list
    """

    id: str
    title: str
    build: Callable[[F], Any | None]
    template: str
    place: Place = "answer"


def study_sections() -> list[ReportSection[RunData]]:
    """The section of each study, by the position that its module `page` gives it."""
    pages = sorted(modules_named(STUDIES, "page"), key=attrgetter("POSITION"))
    sections: list[ReportSection[RunData]] = []
    for page in pages:
        folder = page.__name__.split(".")[-2]
        sections.append(ReportSection(page.ID, page.TITLE, page.build, f"{folder}/page.html"))
    return sections


def extension_sections() -> list[ReportSection[RunData]]:
    """The sections that modules of extensions define; not made when this is imported, since such a module imports it.

    Raises SpecError for one whose id is taken, whose place is not on the page, or whose template is missing.
    """
    sections = {section.id: section for section in OF_A_RUN}
    for module in extension_modules():
        for item in vars(module).values():
            if not isinstance(item, ReportSection):
                continue
            where = f"section {item.id} of {module.__name__}"
            if sections.setdefault(item.id, item) is not item:
                raise taken(where, item.id, "another section")
            if item.place not in get_args(Place):
                raise spec_error(where, f"place={item.place!r}", f"use one of {listed(get_args(Place))}")
            if not _has_template(item.template):
                raise spec_error(
                    where,
                    f"its template {item.template!r} is missing",
                    "write package:file, and make the file part of the package's data",
                )
    return list(sections.values())[len(OF_A_RUN) :]


def _has_template(template: str) -> bool:
    package, _, file = template.rpartition(":")
    try:
        return package != "" and files(package).joinpath(file).is_file()
    except (ModuleNotFoundError, TypeError):  # there is none of that name, or it is a module
        return False


OF_A_RUN: tuple[ReportSection[RunData], ...] = (
    ReportSection("outcome", "", notices.outcome, "outcome.html", "notice"),
    ReportSection("checks", "", notices.failed_checks, "checks.html", "notice"),
    ReportSection("inactive", "", notices.inactive_hooks, "inactive.html", "notice"),
    ReportSection("notes", "", notices.notes, "notes.html", "notice"),
    ReportSection("latest", "", metrics.latest, "latest.html", "numbers"),
    ReportSection("summary", "", summary.build, "summary.html", "numbers"),
    *study_sections(),
    ReportSection("folds", "Most active samples", folds.build, "folds.html"),
    ReportSection("metrics", "Metrics", metrics.build, "metrics.html"),
    ReportSection("hooks", "Hooks", hooks.build, "hooks.html"),
    ReportSection("parts", "By position and sample", metrics.parts_of_passes, "parts_of_passes.html"),
    ReportSection("classes", "Classes", classes.build, "classes.html"),
    ReportSection("plan", "Plan", plan.build, "plan.html", "details"),
    ReportSection("model", "Model", model.build, "model.html", "details"),
    ReportSection("repeat", "Run it again", repeat.of_a_run, "repeat.html", "details"),
)

OF_A_SWEEP: tuple[ReportSection[SweepData], ...] = (
    ReportSection("outcomes", "", notices.of_jobs, "job_outcomes.html", "notice"),
    ReportSection("objective", "Objective", swept.objective, "objective.html", "numbers"),
    ReportSection("figures", "Metrics by swept key", partial(swept.figures, are_few=True), "swept.html"),
    ReportSection("jobs", "Jobs", attrgetter("ranked"), "jobs.html"),
    ReportSection("figures", "Metrics by swept key", partial(swept.figures, are_few=False), "swept.html"),
    ReportSection("depth", "By depth", depth.build, "depth.html"),
    ReportSection("failed", "Failures", attrgetter("failed"), "failed_jobs.html"),
    ReportSection("repeat", "Run it again", repeat.of_a_sweep, "repeat.html", "details"),
)
