"""Pictures of what each hook recorded and captured: numbers over steps as charts, everything else as lines.

The keys of a record decide how it is shown, so records of new actions are shown too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, islice, pairwise
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from hookrun.engine.actions.base import ABOUT, OF_RANK
from hookrun.errors import counted, listed, printable, shortened
from hookrun.report.captures import MOST_VIEWS, CaptureView, place, view_capture
from hookrun.report.changed_share import NOTHING_CHANGED, ChangedShare, changed_share
from hookrun.report.draw.charts import COLOURS, Figure, Series, lines, spans_magnitudes
from hookrun.report.draw.pictures import HeatMap
from hookrun.report.draw.text import module_name, number
from hookrun.report.facts import MOST_HOOKS, MOST_ROWS, MOST_SAMPLES, NOTICES, RunData, on_parameters
from hookrun.report.lines import is_number
from hookrun.report.sample_layers import NO_SAMPLES, SampleChooser, sample_layers
from hookrun.store.captures.read import StoredCapture
from hookrun.store.records import grouped

MOST_CHARTS = 16
MOST_MODES = 4
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


def as_lines(records: Iterable[Record]) -> Iterator[tuple[str, str]]:
    """(place, text) of the first records that contain more than numbers."""
    beyond_numbers = (record for record in records if recorded(record) and not is_measured(record))
    for record in islice(beyond_numbers, MOST_LINES):
        words = list[str]()
        for key, value in recorded(record).items():
            text = f"{value:.6g}" if isinstance(value, float) else printable(str(value))
            words.append(f"{key}={text}")
        at = f"{module_name(str(record['module']))} {printable(str(record.get('path') or ''))}".strip()
        yield f"step {record['step']}  {at}", "  ".join(words)[:MOST_CHARACTERS]


def statistics(
    records: Sequence[Record], places: Mapping[str, int], *, are_gradients: bool
) -> Iterator[Figure]:
    """A chart for each number that a hook recorded; gradient norms come first, also as a map of layers.

    places: module or parameter -> its position in the model
    """
    by_mode = grouped(filter(is_measured, records), lambda record: str(record["mode"]))
    for mode in list(by_mode)[:MOST_MODES]:
        names = dict.fromkeys(chain.from_iterable(map(recorded, by_mode[mode])))
        for name in sorted(list(names)[:MOST_CHARTS], key=lambda name: name != "norm"):
            is_gradient_norm = name == "norm" and are_gradients
            title = "gradient norm" if is_gradient_norm else name
            if len(by_mode) > 1:
                title += f", {mode} mode"
            points, unit = _points(by_mode[mode], name, places)
            yield from over_steps(title, points, unit, name, by_layer=is_gradient_norm)


def over_steps(
    title: str, points: Points, unit: str, name: str, *, by_layer: bool = False
) -> Iterator[Figure]:
    """A few layers as curves, many as a map of layers and steps; both with `by_layer`."""
    longest = max(len(xs) for xs, _ in points.values())
    if len(points) <= COLOURS:
        series = [Series(module_name(path), xs, ys) for path, (xs, ys) in points.items()]
        log = spans_magnitudes(chain.from_iterable(curve.y for curve in series))
        yield lines(title, series, x=unit, y=name, log=log)
    if len(points) > COLOURS or (by_layer and len(points) > 1 and longest > 2):
        yield _map(title, points, unit)


def _map(title: str, points: Points, unit: str) -> Figure:
    """A map of layers over steps; coloured by magnitude if no value is negative and they differ by much.

    With more than `MOST_ROWS` layers, neighbours share a row, which shows their maximum.
    """
    xs = np.concatenate([steps for steps, _ in points.values()])
    ys = np.concatenate([values for _, values in points.values()])
    log = not (ys < 0).any() and spans_magnitudes(ys[ys > 0])
    places, column = np.unique(xs, return_inverse=True)
    block = -(-len(places) // MOST_COLUMNS)
    names = [module_name(path) for path in points]
    size = len(names), -(-len(places) // block)
    row = np.repeat(range(len(names)), [len(values) for _, values in points.values()])
    cell = row * size[1] + column // block
    count = np.bincount(cell, None, math.prod(size)).reshape(size)
    total = np.bincount(cell, ys, math.prod(size)).reshape(size)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = total / count
    valid = count > 0
    notes = list[str]()
    if block > 1:
        notes.append(f"a column is the mean of {block} {unit}s")
    share = -(-len(names) // MOST_ROWS)
    if share > 1:
        notes.append(f"a row is the largest of {share} layers")
        starts = range(0, len(names), share)
        mean = np.maximum.reduceat(np.where(valid, mean, -np.inf), starts)  # NaN if one of them is
        valid = np.logical_or.reduceat(valid, starts)
        names = [_range_of(names[start : start + share]) for start in starts]
    if log:
        notes.append("colours by magnitude")
    return HeatMap(
        f"{title} by layer",
        mean,
        rows=names,
        columns=[number(place) for place in places[::block]],
        x=unit,
        note="; ".join(notes),
        log=log,
        valid=valid,
        facts=tuple(_remarkable_layers(points, unit)),
    ).figure()


def _range_of(names: Sequence[str]) -> str:
    """``first … last``."""
    if len(names) == 1:
        return names[0]
    return f"{names[0]} … {names[-1]}"


def _remarkable_layers(points: Points, unit: str) -> Iterator[str]:
    """Texts that name the layers with the largest and smallest values, and those with zeros, NaN and infinities."""
    largest = list[tuple[str, float, float]]()
    smallest = list[tuple[str, float, float]]()
    zero = list[str]()
    for path, (steps, values) in points.items():
        name = module_name(path)
        pairs = zip(values, steps, strict=True)
        sizes = [(abs(value), step) for value, step in pairs if math.isfinite(value) and value]
        if sizes:  # the first of equal ones
            largest.append((name, *max(sizes, key=itemgetter(0))))
            smallest.append((name, *min(sizes, key=itemgetter(0))))
        elif 0 in values:
            zero.append(name)
    largest.sort(key=itemgetter(1), reverse=True)
    smallest.sort(key=itemgetter(1))
    for title, extremes in (("largest", largest), ("smallest above 0", smallest)):
        if len(extremes) > 1:
            named = [f"{name} {number(size)} ({unit} {number(x)})" for name, size, x in extremes[:MOST_NAMED]]
            yield f"{title}: {', '.join(named)}"
    if zero:
        yield f"exactly 0 throughout, {counted(len(zero), 'layer')}: {listed(zero, MOST_NAMED)}"
    yield from _first_layers(points, unit, "NaN", math.isnan)
    yield from _first_layers(points, unit, "infinite", math.isinf)


def _first_layers(points: Points, unit: str, kind: str, is_kind: Callable[[float], bool]) -> Iterator[str]:
    """A text that names the layers with values of a kind, those that had them first; none without such layers."""
    layers = list[tuple[float, str]]()
    for path, (steps, values) in points.items():
        at = list(compress(steps, map(is_kind, values)))
        if at:
            layers.append((at[0], module_name(path)))
    layers.sort(key=itemgetter(0))
    if layers:
        names = listed([name for _, name in layers], MOST_NAMED)
        yield f"{kind} from {unit} {number(layers[0][0])}, {counted(len(layers), 'layer')}: {names}"


def _points(records: Sequence[Record], name: str, places: Mapping[str, int]) -> tuple[Points, str]:
    """Module -> its values over steps, or over the order of recording if steps restart; and the name of that axis.

    Each rank that recorded its own rows has values of its own.
    """
    by_curve = dict[tuple[str, str, str], tuple[list[float], list[float]]]()
    for record in records:
        if name in record:
            rank = f", rank {record[OF_RANK]}" if OF_RANK in record else ""
            key = str(record["module"]), record.get("path") or "", rank
            steps, values = by_curve.setdefault(key, ([], []))
            steps.append(float(record["step"]))
            values.append(float(record[name]))
    points = Points()
    restarts = False
    for key in sorted(by_curve, key=lambda key: places.get(key[0], len(places))):
        steps, values = by_curve[key]
        points["".join(key)] = steps, values
        restarts |= any(after <= before for before, after in pairwise(steps))
    if not restarts:
        return points, "step"
    for steps, values in points.values():
        steps[:] = map(float, range(len(values)))
    return points, "firing"


@dataclass
class HookView:
    """What the page shows of one hook, or of the predictions.

    order: its position in the plan; -1 if the plan does not have it
    left:  captured tensors that are not drawn
    lines: (place, text) of the first records that contain more than numbers
    samples: for predictions, those of the samples
    changed: how much its edits changed over the steps of a training
    chooser: samples, each through all layers that are drawn
    """

    name: str
    title: str = ""
    order: int = -1
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
    views = list[HookView]()
    for name in names:
        view = HookView(name, order=order.get(name, -1))
        most = share if name in drawn else 0
        _add_pictures(view, facts, records.get(name, []), captured.get(name, []), most)
        views.append(view)
    predicted = grouped(facts.predicted, attrgetter("hook"))
    for captures in list(predicted.values())[:MOST_VIEWS]:
        view = HookView("predictions", "what the model predicted", left=captures[share:])
        view.views = [view_capture(capture, facts, is_prediction=True) for capture in captures[:share]]
        view.samples = _samples(facts)
        views.append(view)
    return [view for view in views if not view.is_empty]


def _add_pictures(
    view: HookView,
    facts: RunData,
    records: Sequence[dict[str, Any]],
    captures: list[StoredCapture],
    most: int,
) -> None:
    """Draw what a hook recorded, and the first `most` of its captures."""
    places = dict[str, int]()
    hook = facts.planned.get(view.name)
    if hook is not None:
        noun = "parameter" if on_parameters(hook.hook) else "module"
        view.title = f"{hook.hook}, {hook.action} on {counted(len(hook.targets), noun)}"
        view.changed = changed_share(hook, facts)
        places = {match.path: place for place, match in enumerate(hook.targets)}
    captures.sort(key=lambda capture: places.get(capture.module, len(places)))
    view.left = captures[most:]
    if min(most, len(captures)) > 1:  # of a single layer its own pictures show the samples
        view.chooser = sample_layers(captures[:most], facts)
    view.views = [view_capture(capture, facts) for capture in captures[:most]]
    view.lines = list(as_lines(records))
    figures = statistics(records, places, are_gradients=facts.sees_gradients(view.name))
    view.figures = list(islice(figures, MOST_CHARTS))
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
    rows = list[tuple[Any, ...]]()
    for line in lines[:MOST_SAMPLES]:
        texts = [shortened(str(line.get(key) or "")) for key in ("file", "class", "predicted_class")]
        rows.append((shortened(line["split"]), line["sample"], *texts, line.get("loss")))
    predicted = [line for line in lines if line.get("predicted_class") is not None]
    wrong = None
    if predicted:
        wrong = sum(line["predicted_class"] != line.get("class") for line in predicted)
    return {"rows": rows, "total": len(lines), "wrong": wrong}
