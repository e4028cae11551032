"""Axes for numbers of any size, with round ticks inside."""

from __future__ import annotations

import math
import re

import pytest

from hookrun.report.draw.axes import axis_of
from hookrun.report.draw.charts import Series, bars, lines


@pytest.mark.parametrize(
    ("values", "log"),
    [
        ([0, 1], False),
        ([-3.2, 1e-9], False),
        ([5, 5], False),
        ([1e-9, 1e6], True),
        ([3], True),
        ([], False),
        ([0], True),
    ],
)
def test_ticks_are_round_and_inside(values: list[float], log: bool) -> None:
    axis = axis_of(values, 0, 100, log=log)
    ticks = axis.ticks()
    assert all(axis.low <= tick <= axis.high for tick in ticks) and len(ticks) <= 8
    assert all(0 <= axis(tick) <= 100 for tick in ticks)
    assert all(axis.low <= value <= axis.high for value in values if value > 0 or not log)


def test_an_axis_fits_numbers_of_any_size() -> None:
    extremes = [1e308, -1e308, 5e-324, -5e-324, 0.0, math.inf, math.nan]
    pairs = [[a, b] for a in extremes for b in extremes]
    for values in pairs:
        for log in (False, True):
            curve = lines("t", [Series("s", [0, 1], values)], x="x", y="y", log=log)
            across = lines(
                "t", [Series("s", sorted(map(abs, extremes[:5])), [1.0] * 5)], x="x", y="y", log_x=log
            )
            axis = axis_of(values, 0, 100, log=log)
            assert all(map(math.isfinite, axis.ticks())) and len(axis.ticks()) < 30
            for picture in (curve.picture, across.picture):
                assert not re.search(r"[ML VH,\"](nan|-?inf)", re.sub(r'data-hover="[^"]*"', "", picture))
        spread = bars("t", values, x="x", y="y", spread=[1e308, 1e308], mark=1e308)
        assert not re.search(r"[MVH ](nan|-?inf)", re.sub(r'data-hover="[^"]*"', "", spread.picture))
    assert (axis_of([2.0, 2.0], 0, 100)(2.0), axis_of([0.0, 10.0], 0, 108)(10.0)) == (50.0, 104.0)
