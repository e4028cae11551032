"""Pictures of what each hook recorded and captured: numbers over steps as charts, everything else as lines.

The keys of a record decide how it is shown, so records of new actions are shown too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import attrgetter, itemgetter
from typing import Any

from hookrun.errors import counted, printable, shortened
from hookrun.report.captures import MOST_VIEWS, CaptureView, place, view_capture
from hookrun.report.changed_share import NOTHING_CHANGED, ChangedShare, changed_share
from hookrun.report.curves import (
    MOST_CHARTS,
    MOST_OPEN,
    Record,
    curves_in,
    fold,
    is_measured,
    over_steps,
    recorded,
    statistics,
)
from hookrun.report.distributions import distributions, quantiles_of
from hookrun.report.draw.charts import Figure
from hookrun.report.draw.text import module_name
from hookrun.report.facts import MOST_HOOKS, MOST_SAMPLES, RunData, on_parameters
from hookrun.report.sample_layers import NO_SAMPLES, SampleChooser, sample_layers
from hookrun.report.sections import metrics
from hookrun.report.trips import marks_on
from hookrun.store.captures.read import StoredCapture
from hookrun.store.records import grouped

MOST_DISTRIBUTIONS = 40
"""Pictures of distributions on a page."""
OPEN_DISTRIBUTIONS = 4
"""Those of a hook that are open; the others are folded."""
MOST_LINES = 60
MOST_CHARACTERS = 400


def as_lines(records: Iterable[Record]) -> Iterator[tuple[str, str]]:
    """(place, text) of the first records that contain more than numbers."""
    beyond_numbers = (record for record in records if recorded(record) and not is_measured(record))
    for record in islice(beyond_numbers, MOST_LINES):
        words: list[str] = []
        for key, value in recorded(record).items():
            text = f"{value:.6g}" if isinstance(value, float) else printable(str(value))
            words.append(f"{key}={text}")
        at = f"{module_name(str(record['module']))} {printable(str(record.get('path') or ''))}".strip()
        yield f"step {record['step']}  {at}", "  ".join(words)[:MOST_CHARACTERS]


@dataclass
class HookView:
    """What the page shows of one hook, or of the predictions.

    order: its position in the plan; -1 if the plan does not have it
    places: module or parameter -> its position in the model
    left:  captured tensors that are not drawn
    lines: (place, text) of the first records that contain more than numbers
    samples: for predictions, those of the samples
    changed: how much its edits changed over the steps of a training
    chooser: samples, each through all layers that are drawn
    """

    name: str
    title: str = ""
    order: int = -1
    places: dict[str, int] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    views: list[CaptureView] = field(default_factory=list)
    left: list[StoredCapture] = field(default_factory=list)
    lines: list[tuple[str, str]] = field(default_factory=list)
    samples: dict[str, Any] | None = None
    changed: ChangedShare = NOTHING_CHANGED
    chooser: SampleChooser = NO_SAMPLES

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        shown = self.figures or self.views or self.left or self.lines
        return not (shown or self.changed.figures or self.changed.note)


def build(facts: RunData) -> list[HookView]:
    """The hooks that recorded something, in firing order; predictions come last."""
    records = grouped(facts.stats.records, itemgetter("hook"))
    captured = grouped(facts.captured, attrgetter("hook"))
    share = max(2, MOST_VIEWS // max(len(captured), 1))
    drawn = set(list(captured)[:MOST_VIEWS])
    order = {name: place for place, name in enumerate(facts.planned)}
    names = list(dict.fromkeys([*captured, *records, *facts.planned]))[:MOST_HOOKS]
    names.sort(key=lambda name: order.get(name, len(order)))
    views: list[HookView] = []
    pictures = max(OPEN_DISTRIBUTIONS, MOST_DISTRIBUTIONS // max(len(records), 1))
    for name in names:
        view = HookView(name, order=order.get(name, -1))
        _add_records(view, facts, records.get(name, []), pictures)
        _add_pictures(view, facts, captured.get(name, []), share if name in drawn else 0)
        views.append(view)
    room = MOST_OPEN - curves_in(metrics.build(facts) or ())
    for view in sorted(
        views, key=lambda view: not any('class="trip"' in each.picture for each in view.figures)
    ):
        room -= curves_in(view.changed.figures)
        view.figures = fold(view.figures, room)
        room -= curves_in(view.figures)
    predicted = grouped(facts.predicted, attrgetter("hook"))
    for captures in list(predicted.values())[:MOST_VIEWS]:
        view = HookView("predictions", "what the model predicted", left=captures[share:])
        view.views = [view_capture(capture, facts, is_prediction=True) for capture in captures[:share]]
        view.samples = _samples(facts)
        views.append(view)
    return [view for view in views if not view.is_empty]


def pictures_of(name: str, facts: RunData) -> list[Figure]:
    """What the page draws of what a hook has recorded."""
    view = HookView(name)
    records = [record for record in facts.stats.records if record["hook"] == name]
    _add_records(view, facts, records, MOST_DISTRIBUTIONS)
    return view.figures


def _add_records(view: HookView, facts: RunData, records: Sequence[dict[str, Any]], most: int) -> None:
    """Draw what a hook recorded, with at most so many distributions."""
    hook = facts.planned.get(view.name)
    if hook is not None:
        noun = "parameter" if on_parameters(hook.hook) else "module"
        view.title = f"{hook.hook}, {hook.action} on {counted(len(hook.targets), noun)}"
        view.changed = changed_share(hook, facts)
        view.places = {match.path: place for place, match in enumerate(hook.targets)}
    view.lines = list(as_lines(records))
    measured = list(filter(is_measured, records))
    figures = statistics(
        measured,
        view.places,
        are_gradients=facts.sees_gradients(view.name),
        marks=marks_on(hook.hook if hook is not None else None, facts),
    )
    view.figures = figures[:MOST_CHARTS]
    pictures = distributions(measured, view.places, quantiles_of(hook), most)
    for number, figure in enumerate(pictures):
        view.figures.append(replace(figure, folded=number >= OPEN_DISTRIBUTIONS))


def _add_pictures(view: HookView, facts: RunData, captures: list[StoredCapture], most: int) -> None:
    """Draw the first `most` captures of a hook."""
    captures.sort(key=lambda capture: view.places.get(capture.module, len(view.places)))
    view.left = captures[most:]
    if min(most, len(captures)) > 1:  # of a single layer its own pictures show the samples
        view.chooser = sample_layers(captures[:most], facts)
    view.views = [view_capture(capture, facts) for capture in captures[:most]]
    norms = {place(drawn.capture): drawn.norms for drawn in view.views if drawn.norms is not None}
    if norms:
        view.figures += over_steps("norm of the captured gradient", norms, "step", "norm", by_layer=True)


def _samples(facts: RunData) -> dict[str, Any] | None:
    """Split, sample, file, class, predicted class, loss of the first samples; None if none has a class or a file.

    wrong: how many samples were misclassified; None if no class was predicted
    """
    lines = facts.samples.records
    if not any(line.get("class") or line.get("file") for line in lines):
        return None
    rows: list[tuple[Any, ...]] = []
    for line in lines[:MOST_SAMPLES]:
        texts = [shortened(str(line.get(key) or "")) for key in ("file", "class", "predicted_class")]
        rows.append((shortened(line["split"]), line["sample"], *texts, line.get("loss")))
    predicted = [line for line in lines if line.get("predicted_class") is not None]
    wrong = None
    if predicted:
        wrong = sum(line["predicted_class"] != line.get("class") for line in predicted)
    return {"rows": rows, "total": len(lines), "wrong": wrong}
