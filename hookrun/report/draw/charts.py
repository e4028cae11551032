"""Charts as inline SVG, in the page's colours for light and dark.

The content of each picture is also a text and a table, for screen readers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from hookrun.errors import counted, printable, shortened
from hookrun.report.draw.text import fitted, number, tick
from hookrun.store.captures.read import spread as evenly_spaced
from hookrun.store.records import grouped

Array = NDArray[np.floating[Any]]

WIDTH, HEIGHT = 440, 230
LEFT, RIGHT, TOP, BOTTOM = 64, 10, 10, 36
COLOURS = 8
MOST_POINTS = 300
_FEW_BINS = 5
_LETTER, _LINE = 6.5, 13
"""Width and height of a letter of a label."""
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_LARGEST = 1e280
"""Larger absolute values are drawn at this bound, on a logarithmic axis also values below 1 / bound, so that positions
stay finite."""

MOST_ROWS = 24
"""Rows of a table; of more, evenly spaced ones are shown, with the first and the last."""
MOST_CELLS = 400
"""Cells of a map that are all listed; for a larger map the table has one line for each row."""
MOST_SERIES = 8
ALL = "the numbers"


@dataclass(frozen=True)
class Table:
    """The numbers of a picture.

    heads: titles of the columns
    rows:  texts, one for each column
    """

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Series:
    """Points in rising order of x, joined by a line.

    low, high: the edges of a band around the line
    dots:      points without a line
    thin:      a thin line without points, behind the others
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    dots: bool = False
    thin: bool = False


@dataclass(frozen=True)
class Figure:
    """A picture with its title, legend, note, facts (one line each) and table of numbers.

    start: what the names in it begin with, which is left out of them
    """

    title: str
    picture: Markup
    legend: tuple[str, ...] = ()
    note: str = ""
    wide: bool = False
    scale: Markup | None = None
    facts: tuple[str, ...] = ()
    table: Table | None = None
    start: str = ""


@dataclass(frozen=True)
class Axis:
    """Maps values from `low` to `high` to positions from `start` to `end`.

    log:   on a logarithmic scale; both bounds are then positive
    whole: values are whole numbers
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    whole: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, _held(value, self.log)
        if self.log:
            low, high, at = map(math.log10, (low, high, at))
        return round(self.start + (at - low) / (high - low) * (self.end - self.start), 1)

    def ticks(self, about: int = 5) -> list[float]:
        """Round numbers inside the range."""
        if self.log and self.high / self.low >= 30:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            return [10.0**power for power in range(first, last + 1, max(1, -(-(last - first) // about)))]
        wanted = (self.high - self.low) / about
        power = 10.0 ** math.floor(math.log10(wanted))
        step = next(step * power for step in _STEPS if step * power >= wanted * (1 - 1e-9))
        if self.whole:
            step = 2.0 if step == 2.5 else max(step, 1.0)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def axis_of(
    values: Iterable[float], start: float, end: float, *, log: bool = False, from_zero: bool = False
) -> Axis:
    """An axis that contains every finite value, with a margin; if logarithmic, every positive value."""
    inside = [_held(value, log) for value in values if math.isfinite(value) and (value > 0 or not log)]
    if not inside:
        return Axis(1.0 if log else 0.0, 10.0 if log else 1.0, start, end, log)
    low, high = min(inside), max(inside)
    if log:
        room = max((high / low) ** 0.04 if high / low < math.inf else _LARGEST**0.08, 1.05)
        return Axis(low / room, high * room, start, end, log)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    largest = max(abs(high), abs(low))
    if high - low <= max(1e-12 * largest, 1 / _LARGEST):  # all the same
        half = largest * 0.5 if largest > 1 / _LARGEST else 0.5
        low, high = low - half, high + half
    room = (high - low) * 0.04
    low -= 0 if from_zero and low == 0 else room
    high += 0 if from_zero and high == 0 else room
    return Axis(low, high, start, end)


def _held(value: float, log: bool) -> float:
    """The value, clamped to the bounds that can be drawn."""
    return min(max(value, 1 / _LARGEST if log else -_LARGEST), _LARGEST)


def spans_magnitudes(values: Iterable[float], ratio: float = 50.0) -> bool:
    """Whether all finite values are positive and so far apart that a logarithmic scale shows more."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) / min(finite) >= ratio


def is_geometric(values: Iterable[float]) -> bool:
    """Whether positive values are spaced more evenly on a logarithmic scale than on a linear one."""
    order = sorted(set(values))
    if len(order) < 2 or order[0] <= 0:
        return False
    linear, logarithmic = (
        max(gaps) / max(min(gaps), 1 / _LARGEST)
        for gaps in (
            [after - before for before, after in pairwise(scale)] for scale in (order, map(math.log, order))
        )
    )
    return logarithmic < linear or (len(order) == 2 and order[1] / order[0] >= 10)


def lines(
    title: str,
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    log: bool = False,
    log_x: bool = False,
    labels: Sequence[str] | None = None,
    note: str = "",
) -> Figure:
    """A line chart; values that are not finite interrupt a curve and are counted in the note.

    log, log_x: a logarithmic axis; values that are not positive are left out
    labels:     names for x = 0, 1, …, where x is not a number
    """
    lost = sum(not _fits(value, log) for each in series for value in each.y)
    series = [_thinned(each) for each in series]
    heights = [value for each in series for band in (each.y, each.low, each.high) if band for value in band]
    xs = [value for each in series for value in each.x]
    across = axis_of(xs, LEFT, WIDTH - RIGHT, log=log_x)
    across = replace(across, whole=all(float(value).is_integer() for value in xs))
    up = axis_of(heights, HEIGHT - BOTTOM, TOP, log=log)
    curves = [part for n, each in enumerate(series) for part in _curve(each, n % COLOURS, across, up)]
    start, names = fitted([each.name for each in series])
    prefixes = [f"{printable(each.name)}  " if len(series) > 1 else "" for each in series]
    points = (
        (at, f"{prefix}{number(value)}")
        for each, prefix in zip(series, prefixes, strict=True)
        for at, value in zip(each.x, each.y, strict=True)
    )
    texts = {at: [text for _, text in there] for at, there in grouped(points, itemgetter(0)).items()}
    hover = [
        (across(at), "\n".join([labels[int(at)] if labels else f"{x} {number(at)}", *texts[at][:12]]))
        for at in sorted(texts)[: 2 * MOST_POINTS]
    ]
    figure = _chart(title, across, up, x, y, curves, hover, of_curves(title, series, x, y, labels), labels)
    return replace(
        figure,
        legend=tuple(names) if len(names) > 1 else (),
        note=_notes(note, lost, "positive and finite" if log else "finite"),
        start=figure.start or start,
    )


def of_curves(
    title: str, curves: Sequence[Series], x: str, y: str, labels: Sequence[str] | None
) -> tuple[str, Table]:
    """A text with the ends and extremes of each curve, and a table of the values of all curves by x."""
    known = [dict(zip(curve.x, curve.y, strict=True)) for curve in curves]
    names = {at: labels[int(at)] if labels else number(at) for at in sorted(set().union(*known))}
    said = [f"{title}: {y} by {x}"]
    for curve in curves[:MOST_SERIES]:
        finite = [value for value in curve.y if math.isfinite(value)]
        if not finite:
            said.append(f"{curve.name}: no finite value")
            continue
        ends = f"{number(curve.y[0])} at {names[curve.x[0]]}, {number(curve.y[-1])} at {names[curve.x[-1]]}"
        said.append(f"{curve.name}: {ends}, least {number(min(finite))}, largest {number(max(finite))}")
    if len(curves) > MOST_SERIES:
        said.append(f"and {counted(len(curves) - MOST_SERIES, 'curve')} more")
    places = evenly_spaced(list(names), MOST_ROWS)
    rows = [(names[at], *(number(each.get(at)) for each in known)) for at in places]
    return "; ".join(said), _table((x, *(curve.name for curve in curves)), rows, len(names), "point")


def _notes(note: str, lost: int, kind: str) -> str:
    """The note, and how many values were left out because they are not `kind`."""
    left_out = f"{lost:,} {'value is' if lost == 1 else 'values are'} not {kind}" if lost else ""
    return "; ".join(filter(None, [note, left_out]))


def histogram(
    title: str, counts: Sequence[int], edges: Sequence[float], *, x: str = "value", note: str = ""
) -> Figure:
    """A histogram of counts [n] between edges [n + 1]; logarithmic if few bins contain nearly all values."""
    across = Axis(edges[0], edges[-1], LEFT, WIDTH - RIGHT)
    is_log = sum(map(bool, counts)) > _FEW_BINS >= sum(count >= max(counts) / 100 for count in counts)
    linear = replace(axis_of([0, *counts], HEIGHT - BOTTOM, TOP, from_zero=True), whole=True)
    up = Axis(0.5, max(counts) * 1.5, HEIGHT - BOTTOM, TOP, log=True) if is_log else linear
    floor = up(up.low)
    boxes = [
        f"M{across(left)} {floor}V{up(count)}H{across(right)}V{floor}Z"
        for count, (left, right) in zip(counts, pairwise(edges), strict=True)
        if count
    ]
    body = [f'<path class="bar c0" d="{"".join(boxes)}"/>']
    if edges[0] < 0 < edges[-1]:
        body.insert(0, f'<path class="zero" d="M{across(0)} {TOP}V{floor}"/>')
    hover = [
        (across((left + right) / 2), f"{tick(left)} to {tick(right)}\n{count:,}")
        for count, (left, right) in zip(counts, pairwise(edges), strict=True)
    ]
    fullest = max(range(len(counts)), key=counts.__getitem__)
    says = (
        f"{title}: {sum(counts):,} values from {number(edges[0])} to {number(edges[-1])}, "
        f"most of them in {number(edges[fullest])} to {number(edges[fullest + 1])}"
    )
    step = -(-len(counts) // MOST_ROWS)  # bins of one row of the table
    rows = [
        (number(edges[start]), number(edges[min(start + step, len(counts))]), f"{count:,}")
        for start in range(0, len(counts), step)
        if (count := sum(counts[start : start + step]))
    ]
    table = Table(ALL, ("from", "to", "count"), tuple(rows))
    y = "count, logarithmic" if is_log else "count"
    return replace(_chart(title, across, up, x, y, body, hover, (says, table)), note=note)


def bars(
    title: str,
    values: Sequence[float],
    *,
    x: str,
    y: str,
    spread: Sequence[float] | None = None,
    names: Sequence[str] | None = None,
    note: str = "",
    mark: float = math.nan,
) -> Figure:
    """A bar chart of the values, with error bars of ± `spread` and a dashed line at `mark`, if it is finite."""
    ends = [(value - error, value + error) for value, error in zip(values, spread or (), strict=False)]
    reach = chain(values, [mark], *ends)
    across = Axis(-0.6, len(values) - 0.4, LEFT, WIDTH - RIGHT, whole=True)
    up = axis_of(reach, HEIGHT - BOTTOM, TOP, from_zero=True)
    width = 0.8 if len(values) < 80 else 1.0
    floor = up(0)
    boxes = [
        f"M{across(n - width / 2)} {floor}V{up(value)}H{across(n + width / 2)}V{floor}Z"
        for n, value in enumerate(values)
        if math.isfinite(value)
    ]
    body = [f'<path class="bar c0" d="{"".join(boxes)}"/>']
    if spread is not None:
        whiskers = "".join(
            f"M{across(n)} {up(low)}V{up(high)}"
            for n, (low, high) in enumerate(ends)
            if math.isfinite(low) and math.isfinite(high)
        )
        body.append(f'<path class="whisker" d="{whiskers}"/>')
    if math.isfinite(mark):
        body.append(f'<path class="zero" d="M{LEFT} {up(mark)}H{WIDTH - RIGHT}"/>')
    body.append(f'<path class="axis" d="M{LEFT} {floor}H{WIDTH - RIGHT}"/>')
    hover = [
        (across(n), f"{names[n] if names else f'{x} {n}'}\n{number(value)}") for n, value in enumerate(values)
    ]
    listed = names or [str(n) for n in range(len(values))]
    says = f"{title}: {counted(len(values), 'bar')} of {y} by {x}{_extremes(np.array(values), listed)}"
    columns = [(x, *listed), (y, *map(number, values))]
    if spread is not None:
        columns.append(("standard deviation", *map(number, spread)))
    heads, *rows = zip(*columns, strict=True)
    table = Table(ALL, heads, tuple(rows))
    note = _notes(note, sum(not math.isfinite(value) for value in values), "finite")
    return replace(_chart(title, across, up, x, y, body, hover, (says, table), names), note=note)


def _curve(series: Series, colour: int, across: Axis, up: Axis) -> Iterator[str]:
    """The band, the line and the points."""
    if series.low is not None and series.high is not None:
        inside = [
            (x, low, high)
            for x, low, high in zip(series.x, series.low, series.high, strict=True)
            if _fits(low, up.log) and _fits(high, up.log)
        ]
        edge = [f"{across(x)} {up(high)}" for x, _, high in inside]
        edge += [f"{across(x)} {up(low)}" for x, low, _ in reversed(inside)]
        if inside:
            yield f'<path class="band c{colour}" d="M{"L".join(edge)}Z"/>'
    points = [
        (across(x), up(y)) if _fits(y, up.log) else None for x, y in zip(series.x, series.y, strict=True)
    ]
    if not series.dots:
        path = [
            f"{'M' if before is None else 'L'}{point[0]} {point[1]}"
            for before, point in pairwise([None, *points])
            if point is not None
        ]
        yield f'<path class="line{" thin" if series.thin else ""} c{colour}" d="{"".join(path)}"/>'
    dots = [f'<circle cx="{point[0]}" cy="{point[1]}" r="2.6"/>' for point in points if point is not None]
    if series.dots or (len(dots) <= 24 and not series.thin):
        yield f'<g class="dot c{colour}">{"".join(dots)}</g>'


def _fits(value: float, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


def _thinned(series: Series) -> Series:
    """The series with at most `MOST_POINTS` points: of neighbours it keeps minimum and maximum, and it keeps gaps."""
    size = len(series.x)
    if size <= MOST_POINTS:
        return series
    kept = list[int]()
    group = -(-2 * size // MOST_POINTS)
    for start in range(0, size, group):
        near = range(start, min(start + group, size))
        some = [n for n in near if math.isfinite(series.y[n])]
        gap = next((n for n in near if not math.isfinite(series.y[n])), None)
        chosen = {min(some, key=series.y.__getitem__), max(some, key=series.y.__getitem__)} if some else set()
        kept += sorted(chosen if gap is None else chosen | {gap})
    low, high = (None if edge is None else [edge[n] for n in kept] for edge in (series.low, series.high))
    x, y = ([values[n] for n in kept] for values in (series.x, series.y))
    return replace(series, x=x, y=y, low=low, high=high)


def _chart(
    title: str,
    across: Axis,
    up: Axis,
    x: str,
    y: str,
    body: Sequence[str],
    hover: Sequence[tuple[float, str]],
    text: tuple[str, Table],
    labels: Sequence[str] | None = None,
) -> Figure:
    """A chart with its axes. Labels that would touch stand upright, and the chart is higher; `y` is cut to its axis.

    body:   the elements between the axes
    hover:  positions from left to right, and the text to show under the pointer at each
    text:   the text alternative and the table
    labels: names for 0, 1, … on the axis `across`
    """
    bottom, width, height, start = HEIGHT - BOTTOM, WIDTH - LEFT - RIGHT, HEIGHT, ""
    grid = [f"M{LEFT} {up(value)}H{WIDTH - RIGHT}" for value in up.ticks()]
    texts = [_text(LEFT - 6, up(value) + 3.5, tick(value), "end") for value in up.ticks()]
    if labels is None:
        below = [(across(value), tick(value)) for value in across.ticks(6)]
        grid += [f"M{at} {TOP}V{bottom}" for at, _ in below]
    else:
        start, names = fitted(labels)
        below = [(across(n), name) for n, name in enumerate(names)]
    longest = max((len(name) for _, name in below), default=0)
    if (longest + 1) * _LETTER * len(below) > width and labels is not None:
        height += round(longest * _LETTER) - _LINE
        texts += [
            f'<text class="tick" text-anchor="end" transform="translate({at + 3.5} {bottom + 6}) rotate(-90)">'
            f"{_said(name)}</text>"
            for at, name in below[:: math.ceil(len(below) * _LINE / width)]
        ]
    else:
        texts += [_text(at, bottom + 14, name, "middle") for at, name in below]
    texts += [
        _text((LEFT + WIDTH - RIGHT) / 2, height - 4, x, "middle", "label"),
        f'<text class="label" text-anchor="middle" transform="translate(11 {(TOP + bottom) / 2}) rotate(-90)">'
        f"{_said(shortened(y, int((bottom - TOP) / _LETTER)))}</text>",
    ]
    says, table = text
    points = {"x": [at for at, _ in hover], "t": [printable(said, kept="\n\t") for _, said in hover]}
    picture = Markup(  # made of numbers and escaped texts alone
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{_said(says)}" '
        f'data-hover="{escape(json.dumps(points))}"><path class="grid" d="{"".join(grid)}"/>'
        f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}"/>{"".join(texts)}{"".join(body)}</svg>'
    )
    return Figure(title, picture, table=table, start=start)


def _said(text: str) -> Markup:
    return escape(printable(text))


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{round(x, 1)}" y="{round(y, 1)}" text-anchor="{anchor}">{_said(text)}</text>'


def of_cells(title: str, values: Array, rows: Sequence[str], columns: Sequence[str]) -> tuple[str, Table]:
    """For a map: a text with the minimum and the maximum, and a table of all cells, or of each row of a large map."""
    names = [" ".join(filter(None, [row, column])) for row in rows for column in columns]
    said = f"{title}: a map of {counted(len(rows), 'row')} and {counted(len(columns), 'column')}"
    said += _extremes(values.ravel(), names)
    if values.size <= MOST_CELLS and values.shape[1] <= MOST_ROWS:
        lines = [
            (rows[n], *("" if math.isnan(value) else number(value) for value in values[n].tolist()))
            for n in range(len(rows))
        ]
        return said, Table(ALL, ("", *columns), tuple(lines))
    lines = [(rows[n], *_extent(values[n])) for n in evenly_spaced(range(len(rows)), MOST_ROWS)]
    return said, _table(("", "least", "mean", "largest"), lines, len(rows), "row")


def of_tiles(title: str, tiles: Array, rows: Sequence[str], columns: str) -> tuple[str, Table]:
    """For tiles [rows, columns, height, width]: a text that describes them, and a table of the range of each tile."""
    count, across, height, width = tiles.shape
    said = f"{title}: {counted(count * across, 'picture')} of {height} × {width}, {columns}"
    low, _, high = _extent(tiles)
    lines = [
        (rows[row] if len(rows) > row else "", str(column), *_extent(tiles[row, column]))
        for row in range(count)
        for column in evenly_spaced(range(across), max(MOST_ROWS // count, 1))
    ]
    table = _table(("", "picture", "least", "mean", "largest"), lines, count * across, "picture")
    return f"{said}; values from {low} to {high}", table


def _extremes(values: Array, names: Sequence[str]) -> str:
    """``, least 1 at a, largest 3 at b``: of the finite ones of the values [n], which have these names."""
    held = np.where(np.isfinite(values), values, np.nan)
    if np.isnan(held).all():
        return ""
    least, largest = int(np.nanargmin(held)), int(np.nanargmax(held))
    return (
        f", least {number(float(values[least]))} at {names[least]}, "
        f"largest {number(float(values[largest]))} at {names[largest]}"
    )


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], total: int, noun: str) -> Table:
    some = "" if len(rows) == total else f", {len(rows)} of {counted(total, noun)}"
    return Table(f"{ALL}{some}", tuple(map(printable, heads)), tuple(rows))


def _extent(values: Array) -> tuple[str, str, str]:
    """Texts of the minimum, mean and maximum of the finite values."""
    finite = values[np.isfinite(values)].astype(np.float64)
    if not finite.size:
        return ("–", "–", "–")
    return number(float(finite.min())), number(float(finite.mean())), number(float(finite.max()))
