"""The pictures of a run's page one by one, and the page itself: what a `Run`, a capture and effects draw and show."""

from __future__ import annotations

from pathlib import Path

from hookrun.engine.html import framed, notebook
from hookrun.errors import HookrunError, nearest
from hookrun.report import write_report
from hookrun.report.captures import view_capture
from hookrun.report.draw.plot import Plot
from hookrun.report.facts import read_facts
from hookrun.report.sections import study_sections
from hookrun.report.sections.hooks import pictures_of
from hookrun.report.sections.metrics import chart, curves_of
from hookrun.store.captures.read import StoredCapture
from hookrun.store.files import open_inside
from hookrun.store.format import PREDICTED, REPORT


def plot_of_metric(folder: Path, name: str) -> Plot:
    """The chart of a metric over the steps, or what the page draws of a hook's records. HookrunError without either."""
    facts = read_facts(folder)
    curves = curves_of(facts)
    if name in curves:
        return Plot(name, [chart(name, curves[name], facts)])
    figures = pictures_of(name, facts)
    if not figures:
        recording = dict.fromkeys(record["hook"] for record in facts.stats.records)
        names = [*curves, *recording]
        raise HookrunError(f"{folder} has no metric {name!r} over steps: {nearest(str(name), names)}")
    return Plot(name, figures)


def plot_of_capture(folder: Path, capture: StoredCapture) -> Plot:
    """The pictures of a capture of the run in `folder`. HookrunError if it cannot be drawn."""
    is_prediction = (capture.hook, capture.module) == PREDICTED
    view = view_capture(capture, read_facts(folder), is_prediction=is_prediction)
    figures = list(view.figures)
    for heads in view.heads:
        figures += heads["figures"]
    if not figures:
        why = view.problem or f"it has a single value, {view.value}"
        raise HookrunError(f"{capture.label} can't be drawn: {why}")
    return Plot(capture.label, figures)


def plot_of_study(folder: Path | None, section: str, title: str) -> Plot:
    """The pictures of a study's section of the page of the run in `folder`. HookrunError if there are none."""
    if folder is None:
        raise HookrunError(f"these {section} were not read from a run, which has the page that draws them")
    facts = read_facts(folder)
    for study in study_sections():
        data = study.build(facts) if study.id == section else None
        if data is not None:
            if not data["figures"]:
                raise HookrunError(f"{folder}: {'; '.join(data['notes'])}")
            return Plot(title, data["figures"])
    raise HookrunError(f"{folder} has nothing to draw for {section}")


def show_page(folder: Path) -> None:
    """Show the page in the notebook, or print its path; a run without a page gets one. StoreError if that fails."""
    path = folder / REPORT
    if not path.is_file():
        path = write_report(folder)
    shell = notebook()
    if shell is None:
        print(path)
        return
    with open_inside(path, folder) as file:
        page = file.read().decode("utf-8", "replace")
    shell.display_pub.publish({"text/plain": str(path), "text/html": framed(page)})
