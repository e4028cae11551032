"""Pictures of what each hook recorded and captured: numbers over steps as charts, everything else as lines.

The keys of a record decide how it is shown, so records of new actions are shown too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np

from hookrun.actions.base import ABOUT
from hookrun.errors import counted, listed
from hookrun.report.captures import CaptureView, place, view_capture
from hookrun.report.draw.axes import spans_magnitudes
from hookrun.report.draw.charts import COLOURS, Figure, Series, lines
from hookrun.report.draw.pictures import heat
from hookrun.report.draw.text import module_name, number, one_line, shortened
from hookrun.report.facts import MOST_HOOKS, NOTICES, Facts
from hookrun.report.lines import is_number
from hookrun.report.section import ReportSection
from hookrun.store.captures.read import StoredCapture

MOST_CHARTS = 16
MOST_MODES = 4
MOST_ROWS = 400
"""Rows of a map; with more layers, neighbours share a row, which shows their maximum."""
MOST_COLUMNS = 200
MOST_NAMED = 5
MOST_LINES = 60
MOST_CHARACTERS = 400

Record = Mapping[str, Any]
Points = dict[str, tuple[list[float], list[float]]]  # name -> steps, values


def recorded(record: Record) -> dict[str, Any]:
    """What the action recorded; empty for a notice."""
    if not NOTICES.isdisjoint(record):
        return {}
    return {key: value for key, value in record.items() if key not in ABOUT}


def is_measured(record: Record) -> bool:
    """Whether everything recorded is a number, which can be drawn over steps."""
    values = recorded(record).values()
    return bool(values) and all(map(is_number, values))


def as_lines(records: Iterable[Record]) -> list[tuple[str, str]]:
    """(place, text) of the first records that contain more than numbers."""
    found = []
    for record in records:
        if (values := recorded(record)) and not is_measured(record):
            words = "  ".join(f"{key}={_short(value)}" for key, value in values.items())
            at = f"{module_name(str(record['module']))} {one_line(str(record.get('path') or ''))}".strip()
            found.append((f"step {record['step']}  {at}", words[:MOST_CHARACTERS]))
            if len(found) == MOST_LINES:
                break
    return found


def statistics(facts: Facts, hook: str, records: Sequence[Record]) -> list[Figure]:
    """A chart for each number that a hook recorded; gradient norms come first, also as a map of layers."""
    measured = [record for record in records if is_measured(record)]
    modes = list(dict.fromkeys(str(record["mode"]) for record in measured))[:MOST_MODES]
    places = facts.places(hook)
    figures = list[Figure]()
    for mode in modes:
        of_mode = [record for record in measured if record["mode"] == mode]
        every = dict.fromkeys(key for record in of_mode for key in recorded(record))
        names = list(every)[:MOST_CHARTS]
        where = f", {mode} mode" if len(modes) > 1 else ""
        for name in sorted(names, key=lambda name: name != "norm"):
            is_gradient_norm = name == "norm" and facts.sees_gradients(hook)
            title = f"{'gradient norm' if is_gradient_norm else name}{where}"
            points, unit = _points(of_mode, name, places)
            figures += over_steps(title, points, unit, name, by_layer=is_gradient_norm)
    return figures[:MOST_CHARTS]


def over_steps(title: str, points: Points, unit: str, name: str, *, by_layer: bool = False) -> list[Figure]:
    """A few layers as curves, many as a map of layers and steps; both with `by_layer`."""
    values = [value for _, ys in points.values() for value in ys]
    log = spans_magnitudes(values)
    figures = []
    longest = max(len(xs) for xs, _ in points.values())
    if len(points) <= COLOURS:
        series = [Series(module_name(path), xs, ys) for path, (xs, ys) in points.items()]
        figures.append(lines(title, series, x=unit, y=name, log=log))
    if len(points) > COLOURS or (by_layer and len(points) > 1 and longest > 2):
        figures.append(_map(title, points, unit))
    return figures


def _map(title: str, points: Points, unit: str) -> Figure:
    """A map of layers over steps; coloured by magnitude if no value is negative and they differ by much."""
    values = [value for _, ys in points.values() for value in ys]
    log = not any(value < 0 for value in values) and spans_magnitudes(value for value in values if value > 0)
    places = sorted({x for xs, _ in points.values() for x in xs})
    block = -(-len(places) // MOST_COLUMNS)
    column = {x: n // block for n, x in enumerate(places)}
    total = np.zeros((len(points), max(column.values()) + 1))
    count = np.zeros(total.shape)
    for row, (xs, ys) in enumerate(points.values()):
        for x, y in zip(xs, ys, strict=True):
            total[row, column[x]] += y
            count[row, column[x]] += 1
    with np.errstate(invalid="ignore", divide="ignore"):
        mean, there = total / count, count > 0
    names = [module_name(path) for path in points]
    notes = [f"a column is the mean of {block} {unit}s"] if block > 1 else []
    share = -(-len(names) // MOST_ROWS)
    if share > 1:
        notes.append(f"a row is the largest of {share} layers")
        mean, there = (_largest(mean, there, share), np.logical_or.reduceat(there, _starts(names, share)))
        names = [_span(names[start : start + share]) for start in _starts(names, share)]
    notes += ["colours by magnitude"] if log else []
    heads = [number(places[n * block]) for n in range(total.shape[1])]
    return heat(
        f"{title} by layer",
        mean,
        rows=names,
        columns=heads,
        x=unit,
        note="; ".join(notes),
        log=log,
        there=there,
        facts=_of_single_layers(points, unit),
    )


def _starts(names: Sequence[str], share: int) -> list[int]:
    return list(range(0, len(names), share))


def _largest(values: Any, there: Any, share: int) -> Any:
    """The maximum of each `share` rows, NaN if one of them is NaN; cells without a value do not count."""
    filled = np.where(there, values, -np.inf)
    return np.maximum.reduceat(filled, _starts(values, share))


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


def _of_single_layers(points: Points, unit: str) -> list[str]:
    """Texts that name the layers with the largest and smallest values, and those with zeros, NaN and infinities."""
    largest, smallest = dict[str, tuple[float, float]](), dict[str, tuple[float, float]]()
    zero, nan, infinite = dict[str, float](), dict[str, float](), dict[str, float]()
    for path, (xs, ys) in points.items():
        name = module_name(path)
        finite = [(abs(y), x) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
        if above := [each for each in finite if each[0] > 0]:
            largest[name] = max(above, key=itemgetter(0))  # the first of equal ones
            smallest[name] = min(above, key=itemgetter(0))
        elif finite:
            zero[name] = finite[0][1]
        for found, is_one in ((nan, math.isnan), (infinite, math.isinf)):
            if (first := next((x for x, y in zip(xs, ys, strict=True) if is_one(y)), None)) is not None:
                found[name] = first

    def extremes(of: Mapping[str, tuple[float, float]], most: bool) -> str:
        ordered = sorted(of.items(), key=lambda item: item[1][0], reverse=most)[:MOST_NAMED]
        return ", ".join(f"{name} {number(value)} ({unit} {number(x)})" for name, (value, x) in ordered)

    facts = [f"largest: {extremes(largest, True)}", f"smallest above 0: {extremes(smallest, False)}"]
    facts = facts if len(largest) > 1 else []
    if zero:
        facts.append(f"exactly 0 throughout, {counted(len(zero), 'layer')}: {listed(zero, MOST_NAMED)}")
    for what, found in (("NaN", nan), ("infinite", infinite)):
        if found:
            since = number(min(found.values()))
            shown = listed(sorted(found, key=found.__getitem__), MOST_NAMED)
            facts.append(f"{what} from {unit} {since}, {counted(len(found), 'layer')}: {shown}")
    return facts


def _points(records: Sequence[Record], name: str, places: Mapping[str, int]) -> tuple[Points, str]:
    """Module -> its values over steps, or over the order of recording if steps restart; and the name of that axis."""
    by_module = defaultdict[tuple[str, str], list[tuple[int, float]]](list)
    for record in records:
        if name in record:
            by_module[record["module"], record.get("path") or ""].append(
                (record["step"], float(record[name]))
            )
    rising = all(all(a[0] < b[0] for a, b in pairwise(some)) for some in by_module.values())
    points: Points = {
        f"{module}{path}": (
            [float(step if rising else n) for n, (step, _) in enumerate(some)],
            [value for _, value in some],
        )
        for (module, path), some in sorted(
            by_module.items(), key=lambda item: places.get(item[0][0], len(places))
        )
    }
    return points, "step" if rising else "firing"


def _short(value: Any) -> str:
    return one_line(f"{value:.6g}" if isinstance(value, float) else str(value))


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
    order = {name: place for place, name in enumerate(facts.planned)}
    names.sort(key=lambda name: order.get(name, len(order)))
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
        order = list(facts.planned).index(name)
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
