"""Histograms in front of each other, one for each step, over one axis of values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hookrun.report.draw.charts import (
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
)
from hookrun.report.draw.text import number

_OVERLAP = 3
"""How many rows high the highest bin of a row is."""


def ridge(
    title: str, places: Sequence[float], rows: Array, edges: Array, *, y: str, table: Table, note: str
) -> Figure:
    """Shares of elements `rows` [n, bins] between the `edges` [bins + 1], each row at its place on the axis `y`.

    Places are whole numbers that rise from row to row. The highest bin of each row has the same height.
    """
    floor = HEIGHT - BOTTOM
    height = (floor - TOP) * _OVERLAP / (len(rows) - 1 + _OVERLAP)
    across = Axis(float(edges[0]), float(edges[-1]), LEFT, WIDTH - RIGHT)
    last = max(places[-1], places[0] + 1)
    up = Axis(places[0], last, floor, TOP + height, whole=True)
    chart = Chart(title, across, up, "value", y)
    middles = [across(float(middle)) for middle in (edges[:-1] + edges[1:]) / 2]
    for place, row in zip(reversed(places), rows[::-1], strict=True):  # later rows are behind
        base = up(place)
        outline = f"M{across(across.low)} {base}"
        for at, share in zip(middles, row / max(row.max(), 1e-12), strict=True):
            outline += f"L{at} {round(base - share * height, 1)}"
        chart.add_path("ridge c0", f"{outline}L{across(across.high)} {base}Z")
    says = (
        f"{title}: {len(rows)} histograms from {y} {number(places[0])} to {number(places[-1])}, "
        f"of values from {number(float(edges[0]))} to {number(float(edges[-1]))}"
    )
    return replace(chart.figure(says, table), note=note)
