"""Numbers that a hook recorded over steps: curves, of which few are open on a page, and maps of many layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, compress, islice, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from hookrun.engine.actions.base import ABOUT, OF_RANK
from hookrun.errors import counted, listed
from hookrun.report.draw.charts import COLOURS, Figure, Series, lines, spans_magnitudes, thinned
from hookrun.report.draw.pictures import HeatMap
from hookrun.report.draw.text import module_name, number
from hookrun.report.facts import MOST_ROWS, NOTICES
from hookrun.report.lines import is_listing, is_number
from hookrun.store.records import grouped

MOST_OPEN = 20
"""Curves of a page that are open; the others are folded."""
MOST_OPEN_METRICS = 12
"""How many of them are curves of metrics at most."""
MOST_DRAWN = 40
"""Curves of a statistic with a map of all its layers that are drawn too."""
MOST_POINTS = 60
"""Points of each of them."""
MOST_CHARTS = 24
LISTING = frozenset({"stats", "expert_load"})
"""The actions whose lists are drawn."""
MOST_MARKS = 24
"""Marks of a curve."""
MOST_STATISTICS = 96
MOST_COLUMNS = 200
MOST_NAMED = 5

Record = Mapping[str, Any]
Points = dict[str, tuple[list[float], list[float]]]  # name -> steps, values
Mark = tuple[float, str]
"""The step at which a rule tripped, and which rule."""
Marks = Mapping[Any, Sequence[Mark]]
"""What names a curve -> its marks."""
NO_MARKS: Mapping[Any, Any] = {}
ORDER = "those with the largest values come first; the map has all"


def recorded(record: Record) -> dict[str, Any]:
    """What the action recorded; empty for a notice."""
    if not NOTICES.isdisjoint(record):
        return {}
    return {key: value for key, value in record.items() if key not in ABOUT}


def is_measured(record: Record) -> bool:
    """Whether everything recorded can be drawn: numbers, and of some actions also lists of them and histograms."""
    has_lists = record["action"] in LISTING
    values = recorded(record).values()
    return bool(values) and all(is_number(value) or (has_lists and is_listing(value)) for value in values)


def curves_in(figures: Iterable[Figure]) -> int:
    """How many curves are drawn in the figures that are open."""
    return sum(figure.picture.count('<path class="line') for figure in figures if not figure.folded)


def fold(figures: Iterable[Figure], room: int) -> list[Figure]:
    """The figures, of which those are folded that have more curves than there is still room for on the page."""
    shown: list[Figure] = []
    for figure in figures:
        is_folded = figure.folded or curves_in([figure]) > max(room, 0)
        shown.append(replace(figure, folded=is_folded))
        room -= curves_in(shown[-1:])
    return shown


class Statistic(NamedTuple):
    """What hooks recorded under a name in a mode.

    suffix:  what titles say of the mode
    modules: module -> its values over steps, or over the order of recording if steps restart
    unit:    which of the two: ``step`` or ``firing``
    """

    name: str
    mode: str
    suffix: str
    modules: dict[str, tuple[list[float], list[Any]]]
    unit: str


def statistics_in(
    records: Iterable[Record], places: Mapping[str, int], is_wanted: Callable[[Any], bool]
) -> Iterator[Statistic]:
    """The statistics with values that are wanted, at modules in the model's order.

    places: module or parameter -> its position in the model
    """
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        for name, value in recorded(record).items():
            if is_wanted(value):
                found.setdefault((record["mode"], name), []).append(record)
    has_modes = len({mode for mode, _ in found}) > 1
    for mode, name in list(found)[:MOST_STATISTICS]:
        suffix = f", {mode} mode" if has_modes else ""
        yield Statistic(name, mode, suffix, *_by_module(found[mode, name], name, places))


def _by_module(
    records: Iterable[Record], name: str, places: Mapping[str, int]
) -> tuple[dict[str, tuple[list[float], list[Any]]], str]:
    """Modules and unit of a statistic. Each rank that recorded its own rows has values of its own."""
    curves = grouped(records, place_of)
    modules: dict[str, tuple[list[float], list[Any]]] = {}
    restarts = False
    for key in sorted(curves, key=lambda key: places.get(key[0], len(places))):
        steps = [float(record["step"]) for record in curves[key]]
        modules["".join(key)] = steps, [record[name] for record in curves[key]]
        restarts |= any(after <= before for before, after in pairwise(steps))
    if not restarts:
        return modules, "step"
    for steps, values in modules.values():
        steps[:] = map(float, range(len(values)))
    return modules, "firing"


def statistics(
    records: Iterable[Record],
    places: Mapping[str, int],
    *,
    are_gradients: bool,
    marks: Mapping[tuple[str, str], Marks] = NO_MARKS,
) -> list[Figure]:
    """The pictures of each number of measured records: first of each its first one, gradient norms before others.

    places: module or parameter -> its position in the model
    marks:  mode and statistic -> those of its curves
    """
    ranked: list[tuple[int, Figure]] = []
    found = statistics_in(records, places, is_number)
    for name, mode, suffix, points, unit in sorted(found, key=lambda each: each.name != "norm"):
        is_gradient_norm = name == "norm" and are_gradients
        title = ("gradient norm" if is_gradient_norm else name) + suffix
        marked = marks.get((mode, name), NO_MARKS) if unit == "step" else NO_MARKS
        figures = list(over_steps(title, points, unit, name, by_layer=is_gradient_norm, marks=marked))
        if len(points) > COLOURS:
            figures += _largest(title, _series(points, marked), unit, name)
        ranked += enumerate(figures)
    ranked.sort(key=itemgetter(0))
    return [figure for _, figure in ranked]


def over_steps(
    title: str, points: Points, unit: str, name: str, *, by_layer: bool = False, marks: Marks = NO_MARKS
) -> Iterator[Figure]:
    """A few layers as curves, many as a map of layers and steps; both with `by_layer`."""
    longest = max(len(xs) for xs, _ in points.values())
    if len(points) <= COLOURS:
        yield from charts(title, _series(points, marks), x=unit, y=name)
    if len(points) > COLOURS or (by_layer and len(points) > 1 and longest > 2):
        yield layer_map(f"{title} by layer", points, unit)


def _series(points: Points, marks: Marks) -> list[Series]:
    series: list[Series] = []
    for path, (xs, ys) in points.items():
        series.append(Series(module_name(path), xs, ys, marks=marks.get(path, ())[:MOST_MARKS]))
    return series


def _largest(title: str, curves: list[Series], unit: str, name: str) -> Iterator[Figure]:
    """Charts of the curves that a rule marked, then of those with the largest absolute values."""
    curves.sort(key=_size, reverse=True)
    drawn = [thinned(curve, MOST_POINTS) for curve in curves[:MOST_DRAWN]]
    yield from charts(title, drawn, x=unit, y=name, total=len(curves), order=ORDER)


def _size(curve: Series) -> tuple[bool, float]:
    """Whether a rule marked the curve, and its largest absolute value."""
    return bool(curve.marks), max(abs(y) if math.isfinite(y) else math.inf for y in curve.y)


def charts(
    title: str,
    curves: Sequence[Series],
    *,
    first: int = 0,
    total: int = 0,
    x: str = "step",
    y: str,
    noun: str = "layer",
    order: str = "",
    log: bool = True,
    labels: Sequence[str] | None = None,
) -> Iterator[Figure]:
    """Charts of the curves, each with as many as there are colours.

    first:  how many curves come before these
    total:  of how many curves these are; if one chart has not room for all, titles say which ones it has
    order:  a note on their order
    log:    whether the axis of values that are far apart is logarithmic
    labels: names for x = 0, 1, …
    """
    total = total or len(curves)
    for start in range(0, len(curves), COLOURS):
        some = curves[start : start + COLOURS]
        which = title
        note = ""
        if total > COLOURS:
            before = first + start
            which += f", {before + 1}–{before + len(some)} of {total} {noun}s"
            note = order
        far_apart = spans_magnitudes(chain.from_iterable(curve.y for curve in some))
        yield lines(which, some, x=x, y=y, log=log and far_apart, labels=labels, note=note)


@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def layer_map(
    title: str,
    points: Points,
    unit: str,
    *,
    noun: str = "layer",
    most: int = MOST_ROWS,
    facts: Sequence[str] = (),
    **options: Any,
) -> Figure:
    """A map of layers, or of other things, over steps; by magnitude if values are far apart and none is negative.

    noun:    what the rows are
    facts:   texts below the map, above those that name remarkable layers
    options: of the `HeatMap`

    With more than `most` layers, neighbours share a row, which shows their maximum.
    """
    names = [module_name(path) for path in points]
    places = np.unique(np.concatenate([steps for steps, _ in points.values()]))
    block = -(-len(places) // MOST_COLUMNS)
    total = np.zeros((len(names), -(-len(places) // block)))
    count = np.zeros(total.shape)
    for row, (steps, values) in enumerate(points.values()):
        column = np.searchsorted(places, steps) // block
        np.add.at(total[row], column, np.array(values, dtype=np.float64))
        np.add.at(count[row], column, 1)
    mean = total / count
    valid = count > 0
    log = not (mean < 0).any() and spans_magnitudes(mean[mean > 0])
    notes: list[str] = []
    if block > 1:
        notes.append(f"a column is the mean of {block} {unit}s")
    share = -(-len(names) // most)
    if share > 1:
        notes.append(f"a row is the largest of {share} {noun}s")
        starts = range(0, len(names), share)
        mean = np.maximum.reduceat(np.where(valid, mean, -np.inf), starts)  # NaN if one of them is
        valid = np.logical_or.reduceat(valid, starts)
        names = [_range_of(names[start : start + share]) for start in starts]
    if log:
        notes.append("colours by magnitude")
    return HeatMap(
        title,
        mean,
        rows=names,
        columns=[number(place) for place in places[::block]],
        x=unit,
        note="; ".join(notes),
        log=log,
        valid=valid,
        facts=(*facts, *_remarkable_layers(points, unit, noun)),
        **options,
    ).figure()


def _range_of(names: Sequence[str]) -> str:
    """``first … last``."""
    if len(names) == 1:
        return names[0]
    return f"{names[0]} … {names[-1]}"


def _remarkable_layers(points: Points, unit: str, noun: str) -> Iterator[str]:
    """Texts that name the layers with the largest and smallest values, and those with zeros, NaN and infinities."""
    sizes: dict[str, list[tuple[float, float]]] = {}
    zero: list[str] = []
    for path, (steps, values) in points.items():
        pairs = zip(values, steps, strict=True)
        sizes[module_name(path)] = [
            (abs(value), step) for value, step in pairs if value and math.isfinite(value)
        ]
        if not any(values):
            zero.append(module_name(path))
    for title, extreme in (("largest", max), ("smallest above 0", min)):
        layers = [
            (name, *extreme(of_layer, key=itemgetter(0))) for name, of_layer in sizes.items() if of_layer
        ]
        layers.sort(key=itemgetter(1), reverse=extreme is max)
        if len(layers) > 1 and noun == "layer":
            named = [f"{name} {number(size)} ({unit} {number(x)})" for name, size, x in layers[:MOST_NAMED]]
            yield f"{title}: {', '.join(named)}"
    if zero:
        yield f"exactly 0 throughout, {counted(len(zero), noun)}: {listed(zero, MOST_NAMED)}"
    for kind, is_kind in (("NaN", math.isnan), ("infinite", math.isinf)):
        first: list[tuple[float, str]] = []
        for path, (steps, values) in points.items():
            first += [(step, module_name(path)) for step in islice(compress(steps, map(is_kind, values)), 1)]
        first.sort(key=itemgetter(0))
        if first:
            names = listed([name for _, name in first], MOST_NAMED)
            yield f"{kind} from {unit} {number(first[0][0])}, {counted(len(first), noun)}: {names}"


def place_of(record: Record) -> tuple[str, str, str]:
    """Module, path in its value and, of a rank that recorded its own rows, the rank: joined, the name of a curve."""
    rank = f", rank {record[OF_RANK]}" if OF_RANK in record else ""
    return str(record["module"]), record.get("path") or "", rank
