"""Charts as inline SVG, in the page's colours for light and dark.

The content of each picture is also a text and a table, for screen readers.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress, pairwise, product, repeat
from operator import itemgetter
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from hookrun.errors import counted, printable, shortened
from hookrun.report.draw.text import fitted, number, tick
from hookrun.store.captures.read import spread as evenly_spaced

Array = NDArray[np.floating[Any]]

WIDTH = 440
HEIGHT = 230
LEFT = 64
RIGHT = 10
TOP = 10
BOTTOM = 36
COLOURS = 8
MOST_POINTS = 300
_FEW_BINS = 5
_LETTER = 6.5
"""Width of a letter of a label."""
_LINE = 13
"""Height of a line of labels."""
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
    marks:     (x, text) of places on the line that get a ring
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    dots: bool = False
    thin: bool = False
    marks: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True)
class Figure:
    """A picture with its title, legend, note, facts (one line each) and table of numbers.

    start:  what the names in it begin with, which is left out of them
    folded: the page shows it only when it is asked for
    alone:  draws the picture as an SVG by itself, if the picture of the page is none
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
    folded: bool = False
    alone: Callable[[], Markup] | None = field(default=None, compare=False, repr=False)


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
        low = self._scaled(self.low)
        share = (self._scaled(_clamped(value, self.log)) - low) / (self._scaled(self.high) - low)
        return round(self.start + share * (self.end - self.start), 1)

    def _scaled(self, value: float) -> float:
        if self.log:
            return math.log10(value)
        return value

    def ticks(self, about: int = 5) -> list[float]:
        """Round numbers inside the range."""
        if self.log and self.high / self.low >= 30:
            first = math.ceil(math.log10(self.low) - 1e-9)
            last = math.floor(math.log10(self.high) + 1e-9)
            stride = max(1, -(-(last - first) // about))
            return [10.0**power for power in range(first, last + 1, stride)]
        step = self._step(about)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]

    def _step(self, about: int) -> float:
        """The smallest round distance with which there are at most `about` intervals."""
        wanted = (self.high - self.low) / about
        power = 10.0 ** math.floor(math.log10(wanted))
        step = power
        for digits in _STEPS:
            step = digits * power
            if step >= wanted * (1 - 1e-9):
                break
        if self.whole and step == 2.5:
            return 2.0
        if self.whole:
            return max(step, 1.0)
        return step


def axis_of(
    values: Iterable[float], start: float, end: float, *, log: bool = False, from_zero: bool = False
) -> Axis:
    """An axis that contains every finite value, with a margin; if logarithmic, every positive value."""
    inside = [_clamped(value, log) for value in values if _fits(value, log)]
    if not inside and log:
        return Axis(1.0, 10.0, start, end, log)
    if not inside:
        return Axis(0.0, 1.0, start, end)
    low = min(inside)
    high = max(inside)
    if log:
        ratio = high / low
        margin = _LARGEST**0.08
        if ratio < math.inf:
            margin = ratio**0.04
        margin = max(margin, 1.05)
        return Axis(low / margin, high * margin, start, end, log)
    if from_zero:
        low = min(low, 0.0)
        high = max(high, 0.0)
    largest = max(abs(high), abs(low))
    if high - low <= max(1e-12 * largest, 1 / _LARGEST):  # all the same
        half = 0.5
        if largest > 1 / _LARGEST:
            half = largest * 0.5
        low -= half
        high += half
    margin = (high - low) * 0.04
    if not (from_zero and low == 0):
        low -= margin
    if not (from_zero and high == 0):
        high += margin
    return Axis(low, high, start, end)


def _clamped(value: float, log: bool) -> float:
    """The value, clamped to the bounds that can be drawn."""
    least = -_LARGEST
    if log:
        least = 1 / _LARGEST
    return min(max(value, least), _LARGEST)


def _fits(value: float, log: bool) -> bool:
    """Whether the value can be drawn on such an axis."""
    return math.isfinite(value) and (value > 0 or not log)


def spans_magnitudes(values: Iterable[float], ratio: float = 50.0) -> bool:
    """Whether all finite values are positive and so far apart that a logarithmic scale shows more."""
    finite = list(filter(math.isfinite, values))
    return bool(finite) and min(finite) > 0 and max(finite) / min(finite) >= ratio


def is_geometric(values: Iterable[float]) -> bool:
    """Whether positive values are spaced more evenly on a logarithmic scale than on a linear one."""
    order = sorted(set(values))
    if len(order) < 2 or order[0] <= 0:
        return False
    if len(order) == 2 and order[1] / order[0] >= 10:
        return True
    return _unevenness(list(map(math.log, order))) < _unevenness(order)


def _unevenness(values: Sequence[float]) -> float:
    """The largest distance of neighbours, divided by the smallest."""
    gaps = [after - before for before, after in pairwise(values)]
    return max(gaps) / max(min(gaps), 1 / _LARGEST)


@dataclass
class Chart:
    """A chart that is being drawn.

    names: names for 0, 1, … on the axis `across`, where its values are not numbers
    body:  the elements between the axes
    hover: positions from left to right, and the text to show under the pointer at each
    """

    title: str
    across: Axis
    up: Axis
    x: str
    y: str
    names: Sequence[str] | None = None
    body: list[str] = field(default_factory=list)
    hover: list[tuple[float, str]] = field(default_factory=list)

    def add_path(self, kind: str, commands: str) -> None:
        """Add a path of the page's class `kind`."""
        self.body.append(f'<path class="{kind}" d="{commands}"/>')

    def add_boxes(self, edges: Iterable[tuple[float, float]], values: Iterable[float], floor: float) -> None:
        """Add bars from the position `floor` up to the values, between the edges on the axis `across`."""
        boxes = ""
        for (left, right), value in zip(edges, values, strict=True):
            boxes += f"M{self.across(left)} {floor}V{self.up(value)}H{self.across(right)}V{floor}Z"
        self.add_path("bar c0", boxes)

    def add_curve(self, series: Series, colour: int) -> None:
        """Add the band, the line and the points."""
        if series.low is not None and series.high is not None:
            self._add_band(series.x, series.low, series.high, colour)
        path = dots = ""
        count = 0
        command = "M"
        for x, y in zip(series.x, series.y, strict=True):
            if not _fits(y, self.up.log):
                command = "M"
                continue
            right = self.across(x)
            top = self.up(y)
            path += f"{command}{right} {top}"
            dots += f'<circle cx="{right}" cy="{top}" r="2.6"/>'
            count += 1
            command = "L"
        if series.thin:
            self.add_path(f"line thin c{colour}", path)
        elif not series.dots:
            self.add_path(f"line c{colour}", path)
        if series.dots or (count <= 24 and not series.thin):
            self.body.append(f'<g class="dot c{colour}">{dots}</g>')
        self._add_marks(series)

    def _add_marks(self, series: Series) -> None:
        """Add a ring on the line at each mark; at the top where the line has no value that can be drawn."""
        fits = [_fits(y, self.up.log) for y in series.y]
        x = list(compress(series.x, fits))
        y = list(compress(series.y, fits))
        for at, text in series.marks:
            top = self.up(float(np.interp(at, x, y))) if x else TOP
            says = f"<title>{_escaped(text)}</title>"
            self.body.append(f'<circle class="trip" cx="{self.across(at)}" cy="{top}" r="5">{says}</circle>')

    def _add_band(self, x: Sequence[float], low: Sequence[float], high: Sequence[float], colour: int) -> None:
        """Add the area between two curves, where both can be drawn."""
        upper: list[str] = []
        lower: list[str] = []
        for at, least, largest in zip(x, low, high, strict=True):
            if _fits(least, self.up.log) and _fits(largest, self.up.log):
                upper.append(f"{self.across(at)} {self.up(largest)}")
                lower.append(f"{self.across(at)} {self.up(least)}")
        if upper:
            lower.reverse()
            self.add_path(f"band c{colour}", f"M{'L'.join(upper + lower)}Z")

    def figure(self, says: str, table: Table) -> Figure:
        """The chart with its axes, its text alternative and its table.

        Labels that would touch stand upright, and the chart is higher; `y` is cut to its axis.
        """
        bottom = HEIGHT - BOTTOM
        width = WIDTH - LEFT - RIGHT
        height = HEIGHT
        start = ""
        grid = ""
        texts = ""
        for value in self.up.ticks():
            grid += f"M{LEFT} {self.up(value)}H{WIDTH - RIGHT}"
            texts += _text(LEFT - 6, self.up(value) + 3.5, tick(value), "end")
        labels: list[tuple[float, str]] = []
        if self.names is None:
            for value in self.across.ticks(6):
                labels.append((self.across(value), tick(value)))
                grid += f"M{self.across(value)} {TOP}V{bottom}"
        else:
            start, names = fitted(self.names)
            labels += [(self.across(n), name) for n, name in enumerate(names)]
        longest = max((len(name) for _, name in labels), default=0)
        if (longest + 1) * _LETTER * len(labels) > width and self.names is not None:
            height += round(longest * _LETTER) - _LINE
            for at, name in labels[:: math.ceil(len(labels) * _LINE / width)]:
                texts += _upright_text(at + 3.5, bottom + 6, name, "tick", "end")
        else:
            for at, name in labels:
                texts += _text(at, bottom + 14, name, "middle")
        texts += _text((LEFT + WIDTH - RIGHT) / 2, height - 4, self.x, "middle", "label")
        y = shortened(self.y, int((bottom - TOP) / _LETTER))
        texts += _upright_text(11, (TOP + bottom) / 2, y, "label", "middle")
        points = {
            "x": [at for at, _ in self.hover],
            "t": [printable(text, kept="\n\t") for _, text in self.hover],
        }
        picture = Markup(  # made of numbers and escaped texts alone
            f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{_escaped(says)}" '
            f'data-hover="{escape(json.dumps(points))}"><path class="grid" d="{grid}"/>'
            f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}"/>{texts}{"".join(self.body)}</svg>'
        )
        return Figure(self.title, picture, table=table, start=start)


def _escaped(text: str) -> Markup:
    return escape(printable(text))


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    at = f'x="{round(x, 1)}" y="{round(y, 1)}"'
    return f'<text class="{kind}" {at} text-anchor="{anchor}">{_escaped(text)}</text>'


def _upright_text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    place = f"translate({x} {y}) rotate(-90)"
    return f'<text class="{kind}" text-anchor="{anchor}" transform="{place}">{_escaped(text)}</text>'


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
    lost = 0
    for curve in series:
        lost += sum(not _fits(value, log) for value in curve.y)
    series = [thinned(curve) for curve in series]
    xs: list[float] = []
    heights: list[float] = []
    for curve in series:
        xs += [*curve.x, *(at for at, _ in curve.marks)]
        heights += [*curve.y, *(curve.low or ()), *(curve.high or ())]
    across = axis_of(xs, LEFT, WIDTH - RIGHT, log=log_x)
    across = replace(across, whole=all(float(value).is_integer() for value in xs))
    chart = Chart(title, across, axis_of(heights, HEIGHT - BOTTOM, TOP, log=log), x, y, labels)
    texts: dict[float, list[str]] = {}
    for place, curve in enumerate(series):
        chart.add_curve(curve, place % COLOURS)
        prefix = f"{printable(curve.name)}  " if len(series) > 1 else ""
        for at, value in zip(curve.x, curve.y, strict=True):
            texts.setdefault(at, []).append(f"{prefix}{number(value)}")
        for at, text in curve.marks:
            texts.setdefault(at, []).append(f"{prefix}{text}")
    for at in sorted(texts)[: 2 * MOST_POINTS]:
        head = labels[int(at)] if labels else f"{x} {number(at)}"
        chart.hover.append((across(at), "\n".join([head, *texts[at][:12]])))
    if any(curve.marks for curve in series):
        note = "; ".join(filter(None, [note, "ring: a rule tripped"]))
    start, names = fitted([curve.name for curve in series])
    figure = chart.figure(*of_curves(title, series, x, y, labels))
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
    values = [dict(zip(curve.x, curve.y, strict=True)) for curve in curves]
    places = sorted(set().union(*values))
    names = {at: labels[int(at)] if labels else number(at) for at in places}
    parts = [f"{title}: {y} by {x}"]
    for curve in curves[:MOST_SERIES]:
        finite = list(filter(math.isfinite, curve.y))
        if not finite:
            parts.append(f"{curve.name}: no finite value")
            continue
        first = f"{number(curve.y[0])} at {names[curve.x[0]]}"
        last = f"{number(curve.y[-1])} at {names[curve.x[-1]]}"
        extremes = f"least {number(min(finite))}, largest {number(max(finite))}"
        parts.append(f"{curve.name}: {first}, {last}, {extremes}")
    if len(curves) > MOST_SERIES:
        parts.append(f"and {counted(len(curves) - MOST_SERIES, 'curve')} more")
    rows: list[tuple[str, ...]] = []
    for at in evenly_spaced(places, MOST_ROWS):
        rows.append((names[at], *(number(of_curve.get(at)) for of_curve in values)))
    heads = (x, *(curve.name for curve in curves))
    return "; ".join(parts), _table(heads, rows, len(places), "point")


def _notes(note: str, lost: int, kind: str) -> str:
    """The note, and how many values were left out because they are not `kind`."""
    notes = [note] if note else []
    if lost == 1:
        notes.append(f"1 value is not {kind}")
    elif lost:
        notes.append(f"{lost:,} values are not {kind}")
    return "; ".join(notes)


def histogram(
    title: str, counts: Sequence[int], edges: Sequence[float], *, x: str = "value", note: str = ""
) -> Figure:
    """A histogram of counts [n] between edges [n + 1]; logarithmic if few bins contain nearly all values."""
    bins = list(pairwise(edges))
    chart = Chart(title, Axis(edges[0], edges[-1], LEFT, WIDTH - RIGHT), _count_axis(counts), x, "count")
    if chart.up.log:
        chart.y = "count, logarithmic"
    floor = chart.up(chart.up.low)
    if edges[0] < 0 < edges[-1]:
        chart.add_path("zero", f"M{chart.across(0)} {TOP}V{floor}")
    chart.add_boxes(compress(bins, counts), filter(None, counts), floor)
    for count, (left, right) in zip(counts, bins, strict=True):
        chart.hover.append((chart.across((left + right) / 2), f"{tick(left)} to {tick(right)}\n{count:,}"))
    fullest = bins[max(range(len(counts)), key=counts.__getitem__)]
    says = (
        f"{title}: {sum(counts):,} values from {number(edges[0])} to {number(edges[-1])}, "
        f"most of them in {number(fullest[0])} to {number(fullest[1])}"
    )
    rows: list[tuple[str, ...]] = []
    step = -(-len(counts) // MOST_ROWS)  # bins of one row of the table
    for start in range(0, len(counts), step):
        end = min(start + step, len(counts))
        count = sum(counts[start:end])
        if count:
            rows.append((number(edges[start]), number(edges[end]), f"{count:,}"))
    figure = chart.figure(says, Table(ALL, ("from", "to", "count"), tuple(rows)))
    return replace(figure, note=note)


def _count_axis(counts: Sequence[int]) -> Axis:
    """The axis of a histogram; logarithmic if few bins contain nearly all values."""
    full = [count for count in counts if count >= max(counts) / 100]
    filled = list(filter(None, counts))
    if len(filled) > _FEW_BINS >= len(full):
        return Axis(0.5, max(counts) * 1.5, HEIGHT - BOTTOM, TOP, log=True)
    return replace(axis_of([0, *counts], HEIGHT - BOTTOM, TOP, from_zero=True), whole=True)


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
    count = len(values)
    lows = list(map(operator.sub, values, spread or ()))
    highs = list(map(operator.add, values, spread or ()))
    across = Axis(-0.6, count - 0.4, LEFT, WIDTH - RIGHT, whole=True)
    up = axis_of([*values, mark, *lows, *highs], HEIGHT - BOTTOM, TOP, from_zero=True)
    chart = Chart(title, across, up, x, y, names)
    floor = up(0)
    half = 0.4 if count < 80 else 0.5
    is_finite = list(map(math.isfinite, values))
    edges = [(place - half, place + half) for place in range(count)]
    chart.add_boxes(compress(edges, is_finite), compress(values, is_finite), floor)
    if spread is not None:
        whiskers = ""
        for place, (low, high) in enumerate(zip(lows, highs, strict=True)):
            if math.isfinite(low) and math.isfinite(high):
                whiskers += f"M{across(place)} {up(low)}V{up(high)}"
        chart.add_path("whisker", whiskers)
    if math.isfinite(mark):
        chart.add_path("zero", f"M{LEFT} {up(mark)}H{WIDTH - RIGHT}")
    chart.add_path("axis", f"M{LEFT} {floor}H{WIDTH - RIGHT}")
    for place, value in enumerate(values):
        name = names[place] if names else f"{x} {place}"
        chart.hover.append((across(place), f"{name}\n{number(value)}"))
    shown_names = names or list(map(str, range(count)))
    says = f"{title}: {counted(count, 'bar')} of {y} by {x}{_extremes(np.array(values), shown_names)}"
    heads = [x, y]
    columns = [shown_names, list(map(number, values))]
    if spread is not None:
        heads.append("standard deviation")
        columns.append(list(map(number, spread)))
    figure = chart.figure(says, Table(ALL, tuple(heads), tuple(zip(*columns, strict=True))))
    return replace(figure, note=_notes(note, is_finite.count(False), "finite"))


def thinned(series: Series, most: int = MOST_POINTS) -> Series:
    """The series with at most `most` points: of neighbours it keeps minimum and maximum, and it keeps gaps."""
    size = len(series.x)
    if size <= most:
        return series
    kept: list[int] = []
    group = -(-2 * size // most)
    for start in range(0, size, group):
        near = range(start, min(start + group, size))
        finite = [n for n in near if math.isfinite(series.y[n])]
        chosen = set[int]()
        if finite:
            chosen.add(min(finite, key=series.y.__getitem__))
            chosen.add(max(finite, key=series.y.__getitem__))
        gaps = sorted(set(near).difference(finite))
        kept += sorted(chosen.union(gaps[:1]))
    at_kept = itemgetter(*kept)
    thinned = replace(series, x=at_kept(series.x), y=at_kept(series.y))
    if series.low is not None and series.high is not None:
        thinned = replace(thinned, low=at_kept(series.low), high=at_kept(series.high))
    return thinned


def of_cells(title: str, values: Array, rows: Sequence[str], columns: Sequence[str]) -> tuple[str, Table]:
    """For a map: a text with the minimum and the maximum, and a table of all cells, or of each row of a large map."""
    names = [" ".join(filter(None, names)) for names in product(rows, columns)]
    says = f"{title}: a map of {counted(len(rows), 'row')} and {counted(len(columns), 'column')}"
    says += _extremes(values.ravel(), names)
    lines: list[tuple[str, ...]] = []
    if values.size <= MOST_CELLS and values.shape[1] <= MOST_ROWS:
        for name, cells in zip(rows, values.tolist(), strict=True):
            lines.append((name, *("" if math.isnan(value) else number(value) for value in cells)))
        return says, Table(ALL, ("", *columns), tuple(lines))
    for row in evenly_spaced(range(len(rows)), MOST_ROWS):
        lines.append((rows[row], *_extent(values[row])))
    return says, _table(("", "least", "mean", "largest"), lines, len(rows), "row")


def of_tiles(title: str, tiles: Array, rows: Sequence[str], columns: str) -> tuple[str, Table]:
    """For tiles [rows, columns, height, width]: a text that describes them, and a table of the range of each tile."""
    count, across, height, width = tiles.shape
    low, _, high = _extent(tiles)
    says = (
        f"{title}: {counted(count * across, 'picture')} of {height} × {width}, {columns}"
        f"; values from {low} to {high}"
    )
    lines: list[tuple[str, ...]] = []
    shown = evenly_spaced(range(across), max(MOST_ROWS // count, 1))
    for row, name in zip(range(count), chain(rows, repeat("")), strict=False):
        for column in shown:
            lines.append((name, str(column), *_extent(tiles[row, column])))
    return says, _table(("", "picture", "least", "mean", "largest"), lines, count * across, "picture")


def _extremes(values: Array, names: Sequence[str]) -> str:
    """``, least 1 at a, largest 3 at b``: of the finite ones of the values [n], which have these names."""
    finite = np.where(np.isfinite(values), values, np.nan)
    if np.isnan(finite).all():
        return ""
    least = int(np.nanargmin(finite))
    largest = int(np.nanargmax(finite))
    return (
        f", least {number(float(values[least]))} at {names[least]}, "
        f"largest {number(float(values[largest]))} at {names[largest]}"
    )


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], total: int, noun: str) -> Table:
    title = ALL
    if len(rows) < total:
        title += f", {len(rows)} of {counted(total, noun)}"
    return Table(title, tuple(map(printable, heads)), tuple(rows))


def _extent(values: Array) -> tuple[str, str, str]:
    """Texts of the minimum, mean and maximum of the finite values."""
    finite = values[np.isfinite(values)].astype(np.float64)
    if not finite.size:
        return "–", "–", "–"
    return number(float(finite.min())), number(float(finite.mean())), number(float(finite.max()))
