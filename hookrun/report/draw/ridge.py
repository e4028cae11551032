"""Histograms in front of each other, one for each step, over one axis of values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hookrun.report.draw.charts import (
    ALL,
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Array,
    Axis,
    Chart,
    Figure,
    Table,
    axis_of,
)
from hookrun.report.draw.text import number
from hookrun.store.captures.read import spread

BINS = 64
MOST_RIDGES = 16
OUTER = 0.001
"""The share of the elements at each end that is outside of a ridge."""
_OVERLAP = 3
"""How many rows high the highest bin of a row is."""

Histogram = Mapping[str, Sequence[float]]
"""`counts` [n] of at least one element, between rising `edges` [n + 1]."""


def ridge(title: str, histograms: Mapping[float, Histogram], y: str) -> Figure:
    """Histograms with any edges, in bins that all of them share, each at its place on the axis `y`.

    Places are whole numbers that rise. The height is the root of a bin's share, so that many
    zeros leave the others visible, and the highest bin of each histogram has the same height.
    """
    places = spread(list(histograms), MOST_RIDGES)
    below = [_below(histograms[place]) for place in places]
    ends = np.stack([np.interp((OUTER, 0.5, 1 - OUTER), share, edges) for edges, share in below])
    bins = np.linspace(ends.min(), ends.max(), BINS + 1)
    floor = HEIGHT - BOTTOM
    height = (floor - TOP) * _OVERLAP / (len(places) - 1 + _OVERLAP)
    across = axis_of(bins[[0, -1]].tolist(), LEFT, WIDTH - RIGHT)
    up = Axis(places[0], max(places[-1], places[0] + 1), floor, TOP + height, whole=True)
    chart = Chart(title, across, up, "value", y)
    middles = list(map(across, (bins[:-1] + bins[1:]) / 2))
    for place, of_row in zip(reversed(places), reversed(below), strict=True):  # later rows are behind
        row = np.sqrt(np.diff(np.interp(bins, *of_row)))
        tops = up(place) - height * row / row.max()
        outline = "".join(f"L{x} {top:.1f}" for x, top in zip(middles, tops, strict=True))
        chart.add_path("ridge c0", f"M{across(bins[0])} {up(place)}{outline}L{across(bins[-1])} {up(place)}Z")
    rows = [(place, *row) for place, row in zip(places, ends.tolist(), strict=True)]
    heads = (y, f"quantile {OUTER}", "median", f"quantile {1 - OUTER}")
    table = Table(ALL, heads, tuple(tuple(map(number, row)) for row in rows))
    note = (
        f"{len(places)} of {len(histograms):,} histograms; the height of a bin is the square root of its share, "
        f"divided by that of the fullest bin; {OUTER:.1%} of the values are left out at each end"
    )
    says = f"{title}: {note}; values from {number(across.low)} to {number(across.high)}"
    return replace(chart.figure(says, table), note=note)


def _below(histogram: Histogram) -> tuple[Array, Array]:
    """Edges [n + 1] and the share of the elements below each."""
    share = np.append(0, np.cumsum(histogram["counts"], dtype=np.float64))
    return np.array(histogram["edges"], dtype=np.float64), share / share[-1]
