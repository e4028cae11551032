"""The page of a run, and the page and the table of a sweep: one HTML file, which loads nothing from the network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar, get_args

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, FunctionLoader, StrictUndefined
from markupsafe import Markup

from hookrun.errors import counted, listed, printable
from hookrun.report.captures import place
from hookrun.report.draw.text import module_name, moment, number
from hookrun.report.facts import named_in, read_facts
from hookrun.report.sections import OF_A_RUN, OF_A_SWEEP, Place, ReportSection, extension_sections
from hookrun.report.sweep_facts import SweepData, read_sweep, read_yaml
from hookrun.report.titles import run_headline, sweep_headline
from hookrun.store.captures.tensor_file import dtype_name
from hookrun.store.description import model_in
from hookrun.store.files import replacing, write_table
from hookrun.store.format import CONFIG, REPORT
from hookrun.version import __version__

F = TypeVar("F")

CSV = "sweep.csv"
SETTINGS_CSV = "sweep_settings.csv"
MOST_KEYS = 4
"""Swept keys of the title."""

_TEMPLATES = Path(__file__).with_name("templates")
_SECTIONS = Path(__file__).with_name("sections")
_STUDIES = Path(__file__).parents[1] / "studies"


def write_run_report(folder: Path) -> Path:
    """Write the page of the run in `folder`; its title says what the run did."""
    facts = read_facts(folder)
    sections = [*OF_A_RUN, *extension_sections()]
    return write_page(folder, "run.html", sections, facts, {"title": run_headline(facts)})


def write_sweep_report(folder: Path) -> Path:
    """Write report.html, sweep.csv and sweep_settings.csv of the runs below `folder`. StoreError if there are none."""
    facts = read_sweep(folder)
    write_table(folder / CSV, _job_rows(facts))
    write_table(folder / SETTINGS_CSV, _setting_rows(facts))
    values = {"title": sweep_headline(facts), "heading": _sweep_heading(facts), "csv": [CSV, SETTINGS_CSV]}
    return write_page(folder, "sweep.html", OF_A_SWEEP, facts, values)


def _sweep_heading(facts: SweepData) -> str:
    """``clip_fc over hooks.clip_fc.max``: the experiment, or task and model, and the swept keys."""
    experiments = {job.overrides.get("experiment") for job in facts.compared} - {None}
    if len(experiments) == 1:
        name = str(experiments.pop())
    else:
        config = read_yaml(facts.folder / facts.jobs[0].name / CONFIG, facts.folder, dict)
        name = f"{named_in(config, 'task')} {model_in(config)}".strip()
    title = name or facts.folder.name
    keys = listed(facts.varied or facts.swept, MOST_KEYS)
    if keys:
        title += f" over {keys}"
    return title


def _job_rows(facts: SweepData) -> Iterator[list[Any]]:
    """One row for each job, with unrounded numbers; if there are baselines, with the differences to its baseline."""
    compared = facts.metrics if facts.baselines else []
    differences = [f"{name} - baseline" for name in compared]
    heads = ["job", "status", "reason", "exit_code", "started", "seconds", "baseline"]
    yield [*heads, *facts.keys, *facts.metrics, "objective", *differences]
    for job in facts.jobs:
        row = [job.name, job.status, job.reason, job.exit_code, job.started, job.seconds]
        row.append(str(job in facts.baselines).lower())
        row += [facts.given(job, key) for key in facts.keys]
        row += map(job.metrics.get, facts.metrics)
        row.append(job.value)
        row += [facts.difference(job, name) for name in compared]
        yield row


def _setting_rows(facts: SweepData) -> Iterator[list[Any]]:
    """One row for each setting: mean and standard deviation of each metric over its jobs, such as the seeds.

    Those of the baselines come first.
    """
    keys = [key for key in facts.varied if key not in facts.averaged]
    heads = [*keys, "baseline", "n"]
    for name in facts.metrics:
        heads += [f"{name} mean", f"{name} std"]
    yield heads
    for setting in [*facts.settings_of(facts.baselines), *facts.settings]:
        row: list[Any] = [setting.values.get(key) for key in keys]
        row.append(str(setting.jobs[0] in facts.baselines).lower())
        row.append(sum(bool(job.metrics) for job in setting.jobs))
        for name in facts.metrics:
            row += setting.of(name)
        yield row


def write_page(
    folder: Path, template: str, sections: Sequence[ReportSection[F]], facts: F, values: Mapping[str, Any]
) -> Path:
    """Build the sections and render them into `report.html`, which is replaced only when the new page is complete.

    Every text on it is escaped, except `Markup`, which only this package makes.
    """
    built: list[tuple[ReportSection[F], Any]] = []
    for part in get_args(Place):
        for section in sections:
            if section.place == part and (data := section.build(facts)):
                built.append((section, data))
    page = made_page(
        template,
        script=template_text("page.js"),
        style=template_text("page.css"),
        facts=facts,
        sections=built,
        built={section.id: data for section, data in built},
        **values,
    )
    path = folder / REPORT
    with replacing(path, flushes=False, flushes_folder=False) as file:  # it can be made again
        file.write(page.encode("utf-8"))
    return path


def made_page(template: str, *, script: Markup, **values: Any) -> str:
    """The text of a page, which runs its own script only and loads nothing, whatever names a run contains."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _ENVIRONMENT.get_template(template).render(
        script=script,
        policy=(
            "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
            f"script-src 'sha256-{digest}'"
        ),
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        version=__version__,
        **values,
    )


def template_text(name: str) -> Markup:
    """The text of a file of the templates, such as the script of a page."""
    return Markup(_TEMPLATES.joinpath(name).read_text(encoding="utf-8").strip())


def _escaped(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value, kept="\n\t")
    return value


def _of_extension(name: str) -> str | None:
    """The text of a template ``package:file`` of an extension; None for another name."""
    package, _, file = name.rpartition(":")
    return files(package).joinpath(file).read_text(encoding="utf-8") if package else None


_ENVIRONMENT = Environment(
    loader=ChoiceLoader([FileSystemLoader([_TEMPLATES, _SECTIONS, _STUDIES]), FunctionLoader(_of_extension)]),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=_escaped,
)
_ENVIRONMENT.filters |= {
    "name": printable,
    "module": module_name,
    "number": number,
    "moment": moment,
    "place": place,
    "dtype": dtype_name,
    "counted": counted,
    "listed": listed,
}
