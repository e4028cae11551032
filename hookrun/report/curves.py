"""Numbers that a hook recorded over steps: curves, of which few are open on a page, and maps of many layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, compress, pairwise, zip_longest
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
MOST_DRAWN = 40
"""Curves of a statistic with a map of all its layers that are drawn too."""
MOST_POINTS = 60
"""Points of each of them."""
MOST_CHARTS = 24
LISTING = frozenset({"stats", "expert_load"})
"""The actions whose lists are drawn."""
MOST_MARKS = 24
"""Marks of a curve."""
MOST_MODES = 4
MOST_COLUMNS = 200
MOST_NAMED = 5

Record = Mapping[str, Any]
Points = dict[str, tuple[list[float], list[float]]]  # name -> steps, values
Mark = tuple[float, str]
"""The step at which a rule tripped, and which rule."""
Marks = Mapping[Any, Sequence[Mark]]
"""What names a curve -> its marks."""
NO_MARKS: Marks = {}


def recorded(record: Record) -> dict[str, Any]:
    """What the action recorded; empty for a notice."""
    if not NOTICES.isdisjoint(record):
        return {}
    return {key: value for key, value in record.items() if key not in ABOUT}


def is_measured(record: Record) -> bool:
    """Whether everything recorded can be drawn: numbers, and of statistics also lists of them and histograms."""
    has_lists = record["action"] in LISTING
    values = recorded(record).values()
    return bool(values) and all(is_number(value) or (has_lists and is_listing(value)) for value in values)


def is_listing(value: Any) -> bool:
    """Whether a value of a statistic holds more than one number."""
    return isinstance(value, list | dict)


def curves_in(figures: Iterable[Figure]) -> int:
    """How many curves are drawn in the figures that are open."""
    return sum(figure.picture.count('<path class="line') for figure in figures if not figure.folded)


def fold(figures: Iterable[Figure], room: int) -> list[Figure]:
    """The figures, of which those are folded that have more curves than there is still room for on the page."""
    shown = list[Figure]()
    for figure in figures:
        curves = curves_in([figure])
        is_folded = figure.folded or curves > max(room, 0)
        room -= 0 if is_folded else curves
        shown.append(replace(figure, folded=is_folded))
    return shown


def statistics(
    records: Iterable[Record],
    places: Mapping[str, int],
    *,
    are_gradients: bool,
    hook_type: str | None = None,
    marks: Marks = NO_MARKS,
) -> Iterator[Figure]:
    """A chart or a map for each number of measured records, gradient norms first; then curves of what has a map.

    places: module or parameter -> its position in the model
    marks:  those of curves by hook type, mode, statistic and name
    """
    by_mode = grouped(records, lambda record: str(record["mode"]))
    curves = list[Iterator[Figure]]()
    for mode in list(by_mode)[:MOST_MODES]:
        names = dict.fromkeys(chain.from_iterable(numbers(record, ABOUT) for record in by_mode[mode]))
        for name in sorted(list(names)[:MOST_CHARTS], key=lambda name: name != "norm"):
            is_gradient_norm = name == "norm" and are_gradients
            title = "gradient norm" if is_gradient_norm else name
            if len(by_mode) > 1:
                title += f", {mode} mode"
            points, unit = by_module(by_mode[mode], name, places, is_number)
            marked = {path: marks.get((hook_type, mode, name, path), ()) for path in points if unit == "step"}
            yield from over_steps(title, points, unit, name, by_layer=is_gradient_norm, marks=marked)
            if len(points) > COLOURS:
                curves.append(_largest(title, points, unit, name, marked))
    yield from filter(None, chain.from_iterable(zip_longest(*curves)))


def over_steps(
    title: str, points: Points, unit: str, name: str, *, by_layer: bool = False, marks: Marks = NO_MARKS
) -> Iterator[Figure]:
    """A few layers as curves, many as a map of layers and steps; both with `by_layer`."""
    longest = max(len(xs) for xs, _ in points.values())
    if len(points) <= COLOURS:
        series = _series(points, marks)
        yield from charts(title, series, len(series), x=unit, y=name, noun="layer", order="")
    if len(points) > COLOURS or (by_layer and len(points) > 1 and longest > 2):
        yield _map(title, points, unit)


def _series(points: Points, marks: Marks) -> list[Series]:
    series = list[Series]()
    for path, (xs, ys) in points.items():
        series.append(Series(module_name(path), xs, ys, marks=marks.get(path, ())[:MOST_MARKS]))
    return series


def _largest(title: str, points: Points, unit: str, name: str, marks: Marks) -> Iterator[Figure]:
    """Charts of the curves that a rule marked, then of those with the largest absolute values."""

    def size(curve: Series) -> tuple[bool, float]:
        return bool(curve.marks), max(abs(y) if math.isfinite(y) else math.inf for y in curve.y)

    curves = sorted(_series(points, marks), key=size, reverse=True)
    first = [thinned(curve, MOST_POINTS) for curve in curves[:MOST_DRAWN]]
    order = "those with the largest values come first; the map has all"
    yield from charts(
        title, first + curves[MOST_DRAWN:], len(first), x=unit, y=name, noun="layer", order=order
    )


def charts(
    title: str,
    curves: Sequence[Series],
    end: int,
    *,
    first: int = 0,
    x: str = "step",
    y: str,
    noun: str,
    order: str,
    log: bool = True,
    labels: Sequence[str] | None = None,
) -> Iterator[Figure]:
    """Charts of the curves from `first` to `end`, each with as many as there are colours.

    Of more curves, titles say which ones they are, and notes in which order.

    log:    whether the axis of values that are far apart is logarithmic
    labels: names for x = 0, 1, …
    """
    for start in range(first, end, COLOURS):
        some = curves[start : min(start + COLOURS, end)]
        which = title
        note = ""
        if len(curves) > COLOURS:
            which += f", {start + 1}–{start + len(some)} of {len(curves)} {noun}s"
            note = order
        far_apart = spans_magnitudes(chain.from_iterable(curve.y for curve in some))
        yield lines(which, some, x=x, y=y, log=log and far_apart, labels=labels, note=note)


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
        value: Any = record.get(name)
        if is_wanted(value):
            steps, values = by_curve.setdefault(place_of(record), ([], []))
            steps.append(float(record["step"]))
            values.append(float(value) if is_number(value) else value)
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
