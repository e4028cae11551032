"""The pictures of a run's page one by one, for `Run.plot`, `StoredCapture.plot` and `Effects.plot`; and `Run.show`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hookrun.engine.discovery import modules_named
from hookrun.engine.html import framed, notebook
from hookrun.errors import HookrunError, nearest
from hookrun.store.files import open_inside
from hookrun.store.format import PREDICTED, REPORT
from hookrun.store.studies import STUDIES

if TYPE_CHECKING:
    from hookrun.report.draw.plot import Plot
    from hookrun.store.captures.read import StoredCapture
    from hookrun.store.reader import Run


def plot_of_metric(run: Run, name: str) -> Plot:
    """The chart of a metric over the steps. HookrunError if the run has no such metric."""
    from hookrun.report.draw.plot import Plot
    from hookrun.report.facts import read_facts
    from hookrun.report.sections.metrics import chart, curves_of

    curves = curves_of(read_facts(run.path))
    if name not in curves:
        raise HookrunError(f"{run.path} has no metric {name!r} over steps: {nearest(str(name), curves)}")
    return Plot(name, [chart(name, curves[name])])


def plot_of_capture(capture: StoredCapture, folder: Path) -> Plot:
    """The pictures of a capture of the run in `folder`. HookrunError if it cannot be drawn."""
    from hookrun.report.captures import view_capture
    from hookrun.report.draw.plot import Plot
    from hookrun.report.facts import read_facts

    is_prediction = (capture.hook, capture.module) == PREDICTED
    view = view_capture(capture, read_facts(folder), is_prediction=is_prediction)
    figures = list(view.figures)
    for heads in view.heads:
        figures += heads["figures"]
    if not figures:
        why = view.problem or f"it has a single value, {view.value}"
        raise HookrunError(f"{capture.label} can't be drawn: {why}")
    return Plot(capture.label, figures)


def plot_of_section(folder: Path, section: str, title: str) -> Plot:
    """The pictures of a study's section in the page of the run in `folder`. HookrunError if it has none."""
    from hookrun.report.draw.plot import Plot
    from hookrun.report.facts import read_facts

    for page in modules_named(STUDIES, "page"):
        if section == page.ID and (built := page.build(read_facts(folder))):
            if built["figures"]:
                return Plot(title, built["figures"])
            raise HookrunError(f"{folder}: {'; '.join(built['notes'])}")
    raise HookrunError(f"{folder} has nothing to draw for {section}")


def show_page(run: Run) -> None:
    """Show the page in the notebook, or print its path; a run without a page gets one. StoreError if that fails."""
    from hookrun.report import write_report

    path = run.path / REPORT
    if not path.is_file():
        path = write_report(run.path)
    shell = notebook()
    if shell is None:
        print(path)
        return
    with open_inside(path, run.path) as file:
        page = file.read().decode("utf-8", "replace")
    shell.display_pub.publish({"text/plain": str(path), "text/html": framed(page)})
