"""Charts show the numbers."""

from __future__ import annotations

import math
import re

import pytest

from hookrun.report.draw.charts import MOST_POINTS, Figure, Series, bars, lines


def points(figure: Figure) -> list[tuple[float, float]]:
    """The points of the first curve, in units of the picture."""
    path = re.search(r'class="line c0" d="([^"]*)"', figure.picture)
    assert path
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.-]+)", path[1])]


def test_a_curve_goes_through_its_points() -> None:
    xs, ys = [0.0, 1, 2, 4], [1.0, -1, 3, 3]
    found = points(lines("t", [Series("a", xs, ys)], x="x", y="y"))
    across, up = zip(*found, strict=True)
    assert [round((x - across[0]) / (across[-1] - across[0]) * 4) for x in across] == xs
    assert up[1] > up[0] > up[2] == up[3], "up is a smaller number"


def test_a_gap_where_a_value_is_not_finite() -> None:
    figure = lines("t", [Series("a", [0, 1, 2], [1.0, math.nan, 2])], x="x", y="y")
    assert figure.picture.count("M") > 2 and "1 value is not finite" in figure.note


def test_a_long_curve_keeps_its_spikes() -> None:
    ys = [0.0] * 100_000
    ys[54_321], ys[77_777] = 9.0, -5.0
    figure = lines("t", [Series("a", list(range(100_000)), ys)], x="x", y="y")
    found = points(figure)
    assert len(found) <= MOST_POINTS + 2
    heights = [y for _, y in found]
    assert len({heights[0], min(heights), max(heights)}) == 3


def test_bars_begin_at_zero() -> None:
    figure = bars("t", [2.0, -1.0], x="x", y="y")
    [boxes] = re.findall(r'class="bar c0" d="([^"]*)"', figure.picture)
    (floor1, top1), (floor2, top2) = re.findall(r"M[\d.]+ ([\d.]+)V([\d.]+)", boxes)
    assert floor1 == floor2
    assert float(floor1) - float(top1) == pytest.approx(2 * (float(top2) - float(floor2)), abs=0.3)
