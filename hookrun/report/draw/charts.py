"""Charts as inline SVG, in the page's colours for light and dark."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from markupsafe import Markup, escape

from hookrun.errors import printable
from hookrun.report.draw.numbers import Series as Series
from hookrun.report.draw.numbers import Table as Table
from hookrun.report.draw.numbers import of_bars, of_bins, of_curves
from hookrun.report.draw.text import number, tick

WIDTH, HEIGHT = 440, 230
LEFT, RIGHT, TOP, BOTTOM = 64, 10, 10, 36
COLOURS = 8
MOST_POINTS = 300
_FEW_BINS = 5
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_LARGEST = 1e280
"""Larger absolute values are drawn at this bound, on a logarithmic axis also values below 1 / bound, so that positions
stay finite."""


@dataclass(frozen=True)
class Figure:
    """A picture with its title, legend, note, facts (one line each) and table of numbers."""

    title: str
    picture: Markup
    legend: tuple[str, ...] = ()
    note: str = ""
    wide: bool = False
    scale: Markup | None = None
    facts: tuple[str, ...] = ()
    table: Table | None = None


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
            stride = max(1, -(-(last - first) // about))
            return [10.0**power for power in range(first, last + 1, stride)]
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
    is_whole = all(float(value).is_integer() for value in xs)
    across = replace(axis_of(xs, LEFT, WIDTH - RIGHT, log=log_x), whole=is_whole)
    up = axis_of(heights, HEIGHT - BOTTOM, TOP, log=log)
    drawn = [_frame(across, up, x, y, labels)]
    drawn += [_curve(each, n % COLOURS, across, up) for n, each in enumerate(series)]
    names = tuple(each.name for each in series) if len(series) > 1 else ()
    says, table = of_curves(title, series, x, y, labels)
    values = dict[float, list[str]]()
    for each in series:
        prefix = f"{printable(each.name)}  " if len(series) > 1 else ""
        for at, value in zip(each.x, each.y, strict=True):
            values.setdefault(at, []).append(f"{prefix}{number(value)}")
    places = sorted(values)[: 2 * MOST_POINTS]
    heads = [labels[int(at)] if labels else f"{x} {number(at)}" for at in places]
    said = ["\n".join([head, *values[at][:12]]) for head, at in zip(heads, places, strict=True)]
    picture = _svg(drawn, [across(at) for at in places], said, says)
    notes = _notes(note, lost, "positive and finite" if log else "finite")
    return Figure(title, picture, names, notes, table=table)


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
    if is_log:
        up = Axis(0.5, max(counts) * 1.5, HEIGHT - BOTTOM, TOP, log=True)
    else:
        up = replace(axis_of([0, *counts], HEIGHT - BOTTOM, TOP, from_zero=True), whole=True)
    floor = up(up.low)
    boxes = [
        f"M{across(left)} {floor}V{up(count)}H{across(right)}V{floor}Z"
        for count, (left, right) in zip(counts, pairwise(edges), strict=True)
        if count
    ]
    zero = [f'<path class="zero" d="M{across(0)} {TOP}V{floor}"/>'] if edges[0] < 0 < edges[-1] else []
    y = "count, logarithmic" if is_log else "count"
    body = [_frame(across, up, x, y), *zero, f'<path class="bar c0" d="{"".join(boxes)}"/>']
    middles = [across((left + right) / 2) for left, right in pairwise(edges)]
    said = [
        f"{tick(left)} to {tick(right)}\n{count:,}"
        for count, (left, right) in zip(counts, pairwise(edges), strict=True)
    ]
    says, table = of_bins(title, counts, edges)
    return Figure(title, _svg(body, middles, said, says), note=note, table=table)


def bars(
    title: str,
    values: Sequence[float],
    *,
    x: str,
    y: str,
    spread: Sequence[float] | None = None,
    names: Sequence[str] | None = None,
    note: str = "",
    mark: float | None = None,
) -> Figure:
    """A bar chart of the values, with error bars of ± `spread` and a dashed line at `mark`."""
    errors = [0.0] * len(values) if spread is None else spread
    ends = [(value - error, value + error) for value, error in zip(values, errors, strict=True)]
    reach = [0.0, *values, *([] if mark is None else [mark]), *(end for pair in ends for end in pair)]
    across = Axis(-0.6, len(values) - 0.4, LEFT, WIDTH - RIGHT, whole=True)
    up = axis_of(reach, HEIGHT - BOTTOM, TOP, from_zero=True)
    width = 0.8 if len(values) < 80 else 1.0
    floor = up(0)
    boxes = [
        f"M{across(n - width / 2)} {floor}V{up(value)}H{across(n + width / 2)}V{floor}Z"
        for n, value in enumerate(values)
        if math.isfinite(value)
    ]
    body = [_frame(across, up, x, y, names), f'<path class="bar c0" d="{"".join(boxes)}"/>']
    if spread is not None:
        whiskers = "".join(
            f"M{across(n)} {up(low)}V{up(high)}"
            for n, (low, high) in enumerate(ends)
            if math.isfinite(low) and math.isfinite(high)
        )
        body.append(f'<path class="whisker" d="{whiskers}"/>')
    if mark is not None:
        body.append(f'<path class="zero" d="M{LEFT} {up(mark)}H{WIDTH - RIGHT}"/>')
    body.append(f'<path class="axis" d="M{LEFT} {floor}H{WIDTH - RIGHT}"/>')
    said = [f"{names[n] if names else f'{x} {n}'}\n{number(value)}" for n, value in enumerate(values)]
    lost = sum(not math.isfinite(value) for value in values)
    places = [across(n) for n in range(len(values))]
    called = names if names is not None else [str(n) for n in range(len(values))]
    says, table = of_bars(title, values, called, x, y, spread)
    return Figure(title, _svg(body, places, said, says), note=_notes(note, lost, "finite"), table=table)


def _curve(series: Series, colour: int, across: Axis, up: Axis) -> str:
    parts = []
    if series.low is not None and series.high is not None:
        inside = [
            (x, low, high)
            for x, low, high in zip(series.x, series.low, series.high, strict=True)
            if _fits(low, up.log) and _fits(high, up.log)
        ]
        there = "L".join(f"{across(x)} {up(high)}" for x, _, high in inside)
        back = "L".join(f"{across(x)} {up(low)}" for x, low, _ in reversed(inside))
        if inside:
            parts.append(f'<path class="band c{colour}" d="M{there}L{back}Z"/>')
    points = [
        (across(x), up(y)) if _fits(y, up.log) else None for x, y in zip(series.x, series.y, strict=True)
    ]
    if not series.dots:
        path = [
            f"{'M' if before is None else 'L'}{point[0]} {point[1]}"
            for before, point in pairwise([None, *points])
            if point is not None
        ]
        kind = "line thin" if series.thin else "line"
        parts.append(f'<path class="{kind} c{colour}" d="{"".join(path)}"/>')
    dots = [f'<circle cx="{point[0]}" cy="{point[1]}" r="2.6"/>' for point in points if point is not None]
    if series.dots or (len(dots) <= 24 and not series.thin):
        parts.append(f'<g class="dot c{colour}">{"".join(dots)}</g>')
    return "".join(parts)


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


def _frame(across: Axis, up: Axis, x: str, y: str, labels: Sequence[str] | None = None) -> str:
    bottom, width = HEIGHT - BOTTOM, WIDTH - LEFT - RIGHT
    grid = [f"M{LEFT} {up(value)}H{WIDTH - RIGHT}" for value in up.ticks()]
    texts = [_text(LEFT - 6, up(value) + 3.5, tick(value), "end") for value in up.ticks()]
    if labels is None:
        below = [(across(value), tick(value)) for value in across.ticks(6)]
        grid += [f"M{at} {TOP}V{bottom}" for at, _ in below]
    else:
        stride = max(1, math.ceil(len(labels) * 26 / width))
        room = int(width / max(len(labels), 1) * stride / 6)
        below = [(across(n), _short(labels[n], room)) for n in range(0, len(labels), stride)]
    texts += [_text(at, bottom + 14, name, "middle") for at, name in below]
    texts += [
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, x, "middle", "label"),
        f'<text class="label" text-anchor="middle" transform="translate(11 {(TOP + bottom) / 2}) rotate(-90)">'
        f"{_said(y)}</text>",
    ]
    axes = f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}"/>'
    return f'<path class="grid" d="{"".join(grid)}"/>{axes}{"".join(texts)}'


def _short(text: str, most: int) -> str:
    """At most `most` characters; of a module path the end, which tells it from its neighbours."""
    text, room = printable(text), max(most, 3)
    if len(text) <= room:
        return text
    return "…" + text[1 - room :] if "." in text else text[: room - 1] + "…"


def _said(text: str) -> Markup:
    return escape(printable(text))


def _text(
    x: float, y: float, text: str, anchor: Literal["start", "middle", "end"], kind: str = "tick"
) -> str:
    return f'<text class="{kind}" x="{round(x, 1)}" y="{round(y, 1)}" text-anchor="{anchor}">{_said(text)}</text>'


def _svg(body: Sequence[str], places: Sequence[float], said: Sequence[str], says: str) -> Markup:
    """The SVG element.

    places, said: positions from left to right, and the text to show under the pointer at each
    says:         the text alternative
    """
    points = escape(json.dumps({"x": list(places), "t": [printable(each, kept="\n\t") for each in said]}))
    return Markup(  # made of numbers and escaped texts alone
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_said(says)}" '
        f'data-hover="{points}">{"".join(body)}</svg>'
    )
