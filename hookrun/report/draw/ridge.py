"""Histograms in front of each other, one for each step, over one axis of values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from hookrun.report.draw.charts import (
    ALL,
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Chart,
    Figure,
    Series,
    Table,
    axis_of,
    thinned,
)
from hookrun.report.draw.text import number
from hookrun.store.captures.read import spread

MOST_RIDGES = 16
MOST_POINTS = 128
"""Points of each of them."""
_OVERLAP = 3
"""How many rows high the fullest bin of a row is."""

Histogram = Mapping[str, Sequence[float]]
"""`counts` [n] of at least one element, between rising `edges` [n + 1]."""


def ridge(title: str, histograms: Mapping[float, Histogram], y: str) -> Figure:
    """Histograms with any edges over one axis of values, each at its place on the axis `y`.

    Places are whole numbers that rise. The fullest bins of all histograms have the same height.
    """
    places = spread(list(histograms), MOST_RIDGES)
    floor = HEIGHT - BOTTOM
    height = (floor - TOP) * _OVERLAP / (len(places) - 1 + _OVERLAP)
    edges = [histograms[place]["edges"] for place in places]
    across = axis_of([each[end] for each in edges for end in (0, -1)], LEFT, WIDTH - RIGHT)
    up = Axis(
        places[0], max(places[-1], math.nextafter(places[0] + 0.5, math.inf)), floor, TOP + height, whole=True
    )
    chart = Chart(title, across, up, "value", y)
    rows: list[tuple[str, ...]] = []
    for place in reversed(places):  # later rows are behind
        outline = _outline(histograms[place])
        base = up(place)
        path = ""
        for x, share in zip(outline.x, outline.y, strict=True):
            path += f"L{across(x)} {base - height * share:.1f}"
        chart.add_path("ridge c0", f"M{path[1:]}Z")
        fullest = outline.x[outline.y.index(max(outline.y))]
        rows.append(tuple(map(number, (place, outline.x[0], fullest, outline.x[-1]))))
    table = Table(ALL, (y, "from", "fullest at", "to"), tuple(reversed(rows)))
    note = f"{len(places)} of {len(histograms):,} histograms; heights are square roots of counts"
    return replace(chart.figure(f"{title}: {note}", table), note=note)


def _outline(histogram: Histogram) -> Series:
    """The square root of the count of each bin at its middle, divided by the largest; 0 at the outer edges.

    By the root, many zeros do not hide all other values.
    """
    edges = histogram["edges"]
    largest = max(histogram["counts"])
    middles = [(left + right) / 2 for left, right in pairwise(edges)]
    roots = [math.sqrt(count / largest) for count in histogram["counts"]]
    inner = thinned(Series("", middles, roots), MOST_POINTS)
    return Series("", [edges[0], *inner.x, edges[-1]], [0, *inner.y, 0])
