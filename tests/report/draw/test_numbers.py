"""Text for screen readers: the same numbers as the pictures show."""

from __future__ import annotations

import math

import numpy as np

from hookrun.report.draw.charts import Series
from hookrun.report.draw.numbers import (
    MOST_ROWS,
    of_bars,
    of_bins,
    of_cells,
    of_curves,
    of_tiles,
)


def test_curves_have_their_ends_and_extremes_and_a_table_by_x() -> None:
    curves = [Series("a", [0, 1, 2], [3.0, -1.0, 2.0]), Series("b", [1], [math.nan])]
    said, table = of_curves("loss", curves, "step", "loss", None)
    assert said == "loss: loss by step; a: 3 at 0, 2 at 2, least -1, largest 3; b: no finite value"
    assert table.heads == ("step", "a", "b")
    assert table.rows == (("0", "3", "–"), ("1", "-1", "NaN"), ("2", "2", "–"))
    long = [Series("a", range(100), [0.0] * 100)]
    assert of_curves("t", long, "x", "y", None)[1].title == f"the numbers, {MOST_ROWS} of 100 points"


def test_bins_are_counted_in_pairs_that_add_up() -> None:
    said, table = of_bins("values", [1] * 30 + [70], list(map(float, range(32))))
    assert said == "values: 100 values from 0 to 31, most of them in 30 to 31"
    assert sum(int(row[2]) for row in table.rows) == 100 and table.rows[0] == ("0", "2", "2")


def test_bars_name_the_least_and_the_largest() -> None:
    said, table = of_bars("t", [1.0, math.nan, -2.0], ["a", "b", "c"], "module", "score", [0.0, 0.5, 1.0])
    assert said == "t: 3 bars of score by module, least -2 at c, largest 1 at a"
    assert table.heads == ("module", "score", "standard deviation") and table.rows[1] == ("b", "NaN", "0.5")


def test_a_small_map_is_listed_whole_and_a_large_one_by_rows() -> None:
    said, table = of_cells("m", np.array([[1.0, np.nan], [2.0, 3.0]]), ["a", "b"], ["x", "y"])
    assert said == "m: a map of 2 rows and 2 columns, least 1 at a x, largest 3 at b y"
    assert table.rows == (("a", "1", ""), ("b", "2", "3"))
    large = np.arange(900.0).reshape(30, 30)
    _, table = of_cells("m", large, [f"r{n}" for n in range(30)], [""] * 30)
    assert table.heads == ("", "least", "mean", "largest") and table.rows[-1] == (
        "r29",
        "870",
        "884.5",
        "899",
    )


def test_tiles_have_the_range_of_each() -> None:
    said, table = of_tiles("t", np.arange(8.0).reshape(1, 2, 2, 2), ["a"], "channels 0–1")
    assert said == "t: 2 pictures of 2 × 2, channels 0–1; values from 0 to 7"
    assert table.rows == (("a", "0", "0", "1.5", "3"), ("a", "1", "4", "5.5", "7"))
