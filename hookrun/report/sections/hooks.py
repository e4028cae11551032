"""Pictures of what each hook recorded and captured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hookrun.errors import counted
from hookrun.report.captures import CaptureView, place, view_capture
from hookrun.report.draw.charts import Figure
from hookrun.report.draw.text import shortened
from hookrun.report.facts import MOST_HOOKS, Facts
from hookrun.report.records import as_lines, over_steps, statistics
from hookrun.report.section import ReportSection
from hookrun.store.captures import StoredCapture

MOST_VIEWS = 40
"""Captured tensors that are drawn, not counting predictions; the others are listed."""


MOST_SAMPLES = 200
"""Samples that are listed with their predicted class."""


@dataclass(frozen=True)
class SampleRows:
    """Names and predicted classes of the first samples.

    rows:  split, sample, file, class and predicted class
    total: how many samples there are
    wrong: how many were misclassified; None if no class was predicted
    """

    rows: list[tuple[str, int, str, str, str]]
    total: int
    wrong: int | None


@dataclass(frozen=True)
class HookViews:
    """What one hook recorded.

    order: its position in the plan; -1 if the plan does not have it
    left:  captured tensors that are not drawn
    lines: (place, text) of the first records that contain more than numbers
    """

    name: str
    title: str
    order: int
    figures: list[Figure]
    views: list[CaptureView]
    left: list[StoredCapture]
    lines: list[tuple[str, str]]
    samples: SampleRows | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.figures or self.views or self.left or self.lines)


def _hooks(facts: Facts) -> list[HookViews] | None:
    """The hooks that recorded something, in firing order; predictions come last."""
    records = defaultdict[str, list[dict[str, Any]]](list)
    for record in facts.stats.records:
        records[record["hook"]].append(record)
    captured = _by_hook(facts.captured)
    names = list(dict.fromkeys([*captured, *records, *facts.planned]))[:MOST_HOOKS]
    names.sort(key=lambda name: facts.order.get(name, len(facts.order)))
    share = max(2, MOST_VIEWS // max(len(captured), 1))
    shares = dict.fromkeys(list(captured)[:MOST_VIEWS], share)
    found = [_of_hook(facts, name, records[name], captured[name], shares.get(name, 0)) for name in names]
    predicted = list(_by_hook(facts.predicted).values())[:MOST_VIEWS]
    found += [_of_predictions(facts, captures, share) for captures in predicted]
    return [each for each in found if not each.is_empty] or None


def _by_hook(captures: Iterable[StoredCapture]) -> defaultdict[str, list[StoredCapture]]:
    found = defaultdict[str, list[StoredCapture]](list)
    for capture in captures:
        found[capture.hook].append(capture)
    return found


def _of_hook(
    facts: Facts, name: str, records: Sequence[dict[str, Any]], captures: Sequence[StoredCapture], share: int
) -> HookViews:
    title, order = "", -1
    if hook := facts.planned.get(name):
        matches = counted(len(hook.targets), "parameter" if facts.is_on_parameters(name) else "module")
        title = f"{hook.hook}, {hook.action} on {matches}"
        order = facts.order[name]
    places = facts.places(name)
    captures = sorted(captures, key=lambda capture: places.get(capture.module, len(places)))
    views = [view_capture(capture, facts) for capture in captures[:share]]
    figures = statistics(facts, name, records)
    if norms := {place(view.capture): view.norms for view in views if view.norms is not None}:
        figures += over_steps("norm of the captured gradient", norms, "step", "norm", by_layer=True)
    return HookViews(name, title, order, figures, views, list(captures[share:]), as_lines(records))


def _of_predictions(facts: Facts, captures: Sequence[StoredCapture], share: int) -> HookViews:
    views = [view_capture(capture, facts, is_prediction=True) for capture in captures[:share]]
    left = list(captures[share:])
    return HookViews("predictions", "what the model predicted", -1, [], views, left, [], _samples(facts))


def _samples(facts: Facts) -> SampleRows | None:
    lines = facts.samples.records
    if not any(line.get("class") or line.get("file") for line in lines):
        return None
    rows = [
        (shortened(str(line["split"])), int(line["sample"]), *_said(line)) for line in lines[:MOST_SAMPLES]
    ]
    judged = [line for line in lines if line.get("predicted_class") is not None]
    wrong = sum(line["predicted_class"] != line.get("class") for line in judged) if judged else None
    return SampleRows(rows, len(lines), wrong)


def _said(line: dict[str, Any]) -> tuple[str, str, str]:
    """File, class and predicted class."""
    file, label, predicted = (
        shortened(str(line.get(key) or "")) for key in ("file", "class", "predicted_class")
    )
    return file, label, predicted


SECTION = ReportSection("hooks", "Hooks", _hooks, "hooks.html")
