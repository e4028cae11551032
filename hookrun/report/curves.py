"""Numbers that a hook recorded over steps: curves, of which a page shows few at once, and maps of many layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, compress, pairwise
from operator import itemgetter
from typing import Any

import numpy as np

from hookrun.engine.actions.base import ABOUT, OF_RANK
from hookrun.errors import counted, listed
from hookrun.report.draw.charts import COLOURS, Figure, Series, lines, spans_magnitudes, thinned
from hookrun.report.draw.pictures import HeatMap
from hookrun.report.draw.text import module_name, number
from hookrun.report.facts import MOST_ROWS, NOTICES
from hookrun.report.lines import is_number, numbers
from hookrun.store.records import grouped

MOST_OPEN = 20
"""Curves of a page that are open; the others are folded."""
MOST_DRAWN = 200
"""Curves of a page, open and folded."""
FOLDED_POINTS = 40
MOST_CHARTS = 16
MOST_MODES = 4
MOST_COLUMNS = 200
MOST_NAMED = 5
LARGEST_FIRST = "the largest values come first"

STATISTICS = frozenset({"stats"})
"""The actions whose lists are drawn."""

Record = Mapping[str, Any]
Points = dict[str, tuple[list[float], list[float]]]  # name -> steps, values


def recorded(record: Record) -> dict[str, Any]:
    """What the action recorded; empty for a notice."""
    if not NOTICES.isdisjoint(record):
        return {}
    return {key: value for key, value in record.items() if key not in ABOUT}


def is_measured(record: Record) -> bool:
    """Whether everything recorded can be drawn: numbers, and of statistics also lists of them and histograms."""
    has_lists = record["action"] in STATISTICS
    values = recorded(record).values()
    return bool(values) and all(is_number(value) or (has_lists and is_listing(value)) for value in values)


def is_listing(value: Any) -> bool:
    """Whether a value of a statistic holds more than one number."""
    return isinstance(value, list | dict)


def shared_out(sizes: Sequence[int], most: int) -> list[int]:
    """How many of `most` curves each of several groups gets: by turns as many as a chart has colours."""
    shares = [0] * len(sizes)
    while most > 0 and shares != list(sizes):
        for place, size in enumerate(sizes):
            more = min(size - shares[place], COLOURS, most)
            shares[place] += more
            most -= more
    return shares


def open_curves(figures: Iterable[Figure]) -> int:
    """How many curves are drawn in the figures that are open."""
    return sum(figure.picture.count('<path class="line') for figure in figures if not figure.folded)


def charts(
    curves: Sequence[Series],
    first: int,
    end: int,
    *,
    title: str,
    y: str,
    noun: str,
    note: str,
    x: str = "step",
    log: bool = False,
    labels: Sequence[str] | None = None,
) -> Iterator[Figure]:
    """Charts of the curves from `first` to `end`, each with as many as there are colours.

    If there are more charts than one, the title says which of the curves they are, and the note in which order.

    labels: names for x = 0, 1, …
    """
    for start in range(first, end, COLOURS):
        stop = min(start + COLOURS, end)
        if stop - start == len(curves):
            yield lines(title, curves, x=x, y=y, log=log, labels=labels)
            continue
        which = f"{title}, {start + 1}–{stop} of {len(curves)} {noun}s"
        yield lines(which, curves[start:stop], x=x, y=y, log=log, labels=labels, note=note)


@dataclass
class StepCurves:
    """The curves of one statistic of a hook in one mode, and a map of its layers.

    mode:     that in which they were recorded; "" for all modes
    name:     the statistic
    unit:     what x counts
    by_layer: whether there is a map of few layers too
    marks:    of some curves the steps at which rules tripped, and which ones
    open:     how many of the curves are open
    drawn:    how many are drawn, open or folded
    """

    title: str
    name: str
    points: Points
    unit: str = "step"
    by_layer: bool = False
    mode: str = ""
    marks: Mapping[str, Sequence[tuple[float, str]]] = field(default_factory=dict)
    open: int = COLOURS
    drawn: int = COLOURS

    def figures(self) -> Iterator[Figure]:
        """The open charts, the map, then the folded charts."""
        curves = self._curves()
        log = spans_magnitudes(chain.from_iterable(curve.y for curve in curves))
        drawing = partial(
            charts, title=self.title, x=self.unit, y=self.name, noun="curve", note=LARGEST_FIRST, log=log
        )
        yield from drawing(curves, 0, self.open)
        longest = max(len(xs) for xs, _ in self.points.values())
        has_map = len(curves) > COLOURS or (self.by_layer and len(curves) > 1 and longest > 2)
        if has_map and self.drawn:
            yield _map(self.title, self.points, self.unit)
        curves[self.open : self.drawn] = [
            thinned(curve, FOLDED_POINTS) for curve in curves[self.open : self.drawn]
        ]
        for figure in drawing(curves, self.open, self.drawn):
            yield replace(figure, folded=True)

    def _curves(self) -> list[Series]:
        """The curves; unless all are open, those that a rule marked come first, then those with the largest values."""
        curves = [
            Series(module_name(path), xs, ys, marks=self.marks.get(path, ()))
            for path, (xs, ys) in self.points.items()
        ]
        if self.open < len(curves):
            curves.sort(key=lambda curve: (bool(curve.marks), largest(curve.y)), reverse=True)
        return curves


def largest(values: Iterable[float]) -> float:
    """The largest absolute value; infinite if a value is not finite, and 0 without a value."""
    return max((abs(value) if math.isfinite(value) else math.inf for value in values), default=0.0)


def step_curves(
    records: Sequence[Record], places: Mapping[str, int], *, are_gradients: bool
) -> Iterator[StepCurves]:
    """The curves of each number of records that can be drawn; gradient norms come first.

    places: module or parameter -> its position in the model
    """
    by_mode = grouped(records, lambda record: str(record["mode"]))
    for mode in list(by_mode)[:MOST_MODES]:
        names = dict.fromkeys(chain.from_iterable(numbers(record, ABOUT) for record in by_mode[mode]))
        for name in sorted(list(names)[:MOST_CHARTS], key=lambda name: name != "norm"):
            is_gradient_norm = name == "norm" and are_gradients
            title = "gradient norm" if is_gradient_norm else name
            if len(by_mode) > 1:
                title += f", {mode} mode"
            modules, unit = by_module(by_mode[mode], name, places, is_number)
            points = {path: (steps, list(map(float, values))) for path, (steps, values) in modules.items()}
            yield StepCurves(title, name, points, unit, is_gradient_norm, mode)


def statistics(
    records: Sequence[Record], places: Mapping[str, int], *, are_gradients: bool
) -> Iterator[Figure]:
    """A picture of each number that a hook recorded."""
    for curves in step_curves(list(filter(is_measured, records)), places, are_gradients=are_gradients):
        yield from over_steps(curves.title, curves.points, curves.unit, curves.name, by_layer=curves.by_layer)


def over_steps(
    title: str, points: Points, unit: str, name: str, *, by_layer: bool = False
) -> Iterator[Figure]:
    """A few layers as curves, many as a map of layers and steps; both with `by_layer`."""
    if len(points) > COLOURS:
        yield _map(title, points, unit)
    else:
        count = len(points)
        yield from StepCurves(title, name, points, unit, by_layer, open=count, drawn=count).figures()


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


def place_of(record: Record) -> tuple[str, str, str]:
    """Module, path in its value and, of a rank that recorded its own rows, the rank: joined, the name of a curve."""
    rank = f", rank {record[OF_RANK]}" if OF_RANK in record else ""
    return str(record["module"]), record.get("path") or "", rank


def by_module(
    records: Iterable[Record], name: str, places: Mapping[str, int], is_wanted: Callable[[Any], bool]
) -> tuple[dict[str, tuple[list[float], list[Any]]], str]:
    """Module -> its values over steps, or over the order of recording if steps restart; and the name of that axis.

    Each rank that recorded its own rows has values of its own.
    """
    by_curve = dict[tuple[str, str, str], tuple[list[float], list[Any]]]()
    for record in records:
        if is_wanted(record.get(name)):
            steps, values = by_curve.setdefault(place_of(record), ([], []))
            steps.append(float(record["step"]))
            values.append(record[name])
    modules = dict[str, tuple[list[float], list[Any]]]()
    restarts = False
    for key in sorted(by_curve, key=lambda key: places.get(key[0], len(places))):
        steps, values = by_curve[key]
        modules["".join(key)] = steps, values
        restarts |= any(after <= before for before, after in pairwise(steps))
    if not restarts:
        return modules, "step"
    for steps, values in modules.values():
        steps[:] = map(float, range(len(values)))
    return modules, "firing"
