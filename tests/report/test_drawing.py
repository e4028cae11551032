"""Charts and maps show the numbers, to screen readers too; numbers and names as text."""

from __future__ import annotations

import base64
import io
import math
import re

import numpy as np
import pytest
import torch
from PIL import Image

from hookrun.errors import printable, shortened
from hookrun.report.draw import text
from hookrun.report.draw.charts import (
    MOST_POINTS,
    MOST_ROWS,
    Figure,
    Series,
    axis_of,
    bars,
    histogram,
    lines,
    of_cells,
    of_curves,
    of_tiles,
)
from hookrun.report.draw.pictures import encoded, mosaic, palette
from hookrun.store.summary import seconds_between

# ---- axes


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
def test_ticks_are_round_numbers_inside_the_axis(values: list[float], log: bool) -> None:
    axis = axis_of(values, 0, 100, log=log)
    ticks = axis.ticks()
    for tick in ticks:
        assert axis.low <= tick <= axis.high
    assert len(ticks) <= 8
    for tick in ticks:
        assert 0 <= axis(tick) <= 100
    for value in values:
        if value > 0 or not log:
            assert axis.low <= value <= axis.high


def test_an_axis_fits_numbers_of_any_size() -> None:
    extremes = [1e308, -1e308, 5e-324, -5e-324, 0.0, math.inf, math.nan]
    sizes = Series("s", sorted(map(abs, extremes[:5])), [1.0] * 5)
    for values in [[a, b] for a in extremes for b in extremes]:
        drawn = [bars("t", values, x="x", y="y", spread=[1e308, 1e308], mark=1e308)]
        for log in (False, True):
            drawn.append(lines("t", [Series("s", [0, 1], values)], x="x", y="y", log=log))
            drawn.append(lines("t", [sizes], x="x", y="y", log_x=log))
            ticks = axis_of(values, 0, 100, log=log).ticks()
            assert all(map(math.isfinite, ticks))
            assert len(ticks) < 30
        for figure in drawn:
            assert not re.search(r"[MLVH ,\"](nan|-?inf)", re.sub(r'data-hover="[^"]*"', "", figure.picture))
    assert axis_of([2.0, 2.0], 0, 100)(2.0) == 50.0
    assert axis_of([0.0, 10.0], 0, 108)(10.0) == 104.0


# ---- charts


def points(figure: Figure) -> list[tuple[float, float]]:
    """The points of the first curve, in units of the picture."""
    path = re.search(r'class="line c0" d="([^"]*)"', figure.picture)
    assert path
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.-]+)", path[1])]


def test_a_curve_goes_through_its_points() -> None:
    xs = [0.0, 1, 2, 4]
    ys = [1.0, -1, 3, 3]
    across, up = zip(*points(lines("t", [Series("a", xs, ys)], x="x", y="y")), strict=True)
    assert [round((x - across[0]) / (across[-1] - across[0]) * 4) for x in across] == xs
    assert up[1] > up[0] > up[2] == up[3], "up is a smaller number"


def test_a_gap_where_a_value_is_not_finite() -> None:
    figure = lines("t", [Series("a", [0, 1, 2], [1.0, math.nan, 2])], x="x", y="y")
    assert figure.picture.count("M") > 2
    assert "1 value is not finite" in figure.note


def test_a_long_curve_keeps_its_spikes() -> None:
    ys = [0.0] * 100_000
    ys[54_321], ys[77_777] = 9.0, -5.0
    heights = [y for _, y in points(lines("t", [Series("a", range(100_000), ys)], x="x", y="y"))]
    assert len(heights) <= MOST_POINTS + 2
    assert len({heights[0], min(heights), max(heights)}) == 3


def test_bars_begin_at_zero() -> None:
    figure = bars("t", [2.0, -1.0], x="x", y="y")
    [boxes] = re.findall(r'class="bar c0" d="([^"]*)"', figure.picture)
    (floor1, top1), (floor2, top2) = re.findall(r"M[\d.]+ ([\d.]+)V([\d.]+)", boxes)
    assert floor1 == floor2
    assert float(floor1) - float(top1) == pytest.approx(2 * (float(top2) - float(floor2)), abs=0.3)


def test_bars_have_a_line_only_at_a_finite_value() -> None:
    lines_at = [
        "zero" in bars("t", [1.0], x="x", y="y", mark=mark).picture for mark in (2.0, math.nan, math.inf)
    ]
    assert lines_at == [True, False, False]


def test_a_long_name_is_cut_to_the_axis_beside_it() -> None:
    figure = bars("t", [1.0], x="x", y="standard deviation over the samples of a metric")
    [name] = re.findall(r'rotate\(-90\)">([^<]*)<', figure.picture)
    assert name == "standard devia…es of a metric"


# ---- text for screen readers


def test_curves_have_a_table_by_x() -> None:
    curves = [Series("a", [0, 1, 2], [3.0, -1.0, 2.0]), Series("b", [1], [math.nan])]
    said, table = of_curves("loss", curves, "step", "loss", None)
    assert said == "loss: loss by step; a: 3 at 0, 2 at 2, least -1, largest 3; b: no finite value"
    assert table.heads == ("step", "a", "b")
    assert table.rows == (("0", "3", "–"), ("1", "-1", "NaN"), ("2", "2", "–"))
    long = [Series("a", range(100), [0.0] * 100)]
    assert of_curves("t", long, "x", "y", None)[1].title == f"the numbers, {MOST_ROWS} of 100 points"


def test_bins_are_counted_in_pairs_that_add_up() -> None:
    figure = histogram("values", [1] * 30 + [70], list(map(float, range(32))))
    assert 'aria-label="values: 100 values from 0 to 31, most of them in 30 to 31"' in figure.picture
    assert figure.table is not None
    assert figure.table.rows[0] == ("0", "2", "2")
    assert sum(int(row[2]) for row in figure.table.rows) == 100


def test_bars_name_the_largest() -> None:
    figure = bars(
        "t", [1.0, math.nan, -2.0], x="module", y="score", names=["a", "b", "c"], spread=[0.0, 0.5, 1.0]
    )
    assert "t: 3 bars of score by module, least -2 at c, largest 1 at a" in figure.picture
    assert figure.table is not None
    assert figure.table.rows[1] == ("b", "NaN", "0.5")
    assert figure.table.heads == ("module", "score", "standard deviation")


def test_a_large_map_is_listed_by_rows() -> None:
    said, table = of_cells("m", np.array([[1.0, np.nan], [2.0, 3.0]]), ["a", "b"], ["x", "y"])
    assert said == "m: a map of 2 rows and 2 columns, least 1 at a x, largest 3 at b y"
    assert table.rows == (("a", "1", ""), ("b", "2", "3"))
    _, table = of_cells("m", np.arange(900.0).reshape(30, 30), [f"r{n}" for n in range(30)], [""] * 30)
    assert table.heads == ("", "least", "mean", "largest")
    assert table.rows[-1] == ("r29", "870", "884.5", "899")


def test_tiles_have_the_range_of_each() -> None:
    said, table = of_tiles("t", np.arange(8.0).reshape(1, 2, 2, 2), ["a"], "channels 0–1")
    assert said == "t: 2 pictures of 2 × 2, channels 0–1; values from 0 to 7"
    assert table.rows == (("a", "0", "0", "1.5", "3"), ("a", "1", "4", "5.5", "7"))


# ---- pictures


def image(figure: Figure) -> Image.Image:
    """The first picture of the figure."""
    encoded = re.search(r"base64,([\w+/=]+)", figure.picture)
    assert encoded
    return Image.open(io.BytesIO(base64.b64decode(encoded[1])))


def test_maps_have_a_pixel_for_each_element() -> None:
    tiles = np.zeros((2, 3, 4, 5), dtype=np.float32)
    tiles[1, 2, 3, 4] = 1
    picture = np.asarray(image(mosaic("maps", tiles, rows=["a", "b"], columns="")))
    assert picture.shape == (2 * 5 - 1, 3 * 6 - 1)
    assert picture[-1, -1] == picture[picture != 255].max() == 254
    assert (picture[:4, :5] == 0).all()
    assert (picture[4] == 255).all(), "a gap between tiles"


def test_large_maps_are_averaged() -> None:
    tile = torch.randn(1, 1, 130, 57).numpy()
    assert image(mosaic("maps", tile, rows=["a"], columns="")).size == (29, 44)


@pytest.mark.parametrize(
    ("room", "pages", "left"), [(2**20, 2, ""), (1, 0, "4 of its channels are left out")]
)
def test_further_columns_are_shown_on_demand(room: int, pages: int, left: str) -> None:
    tiles = torch.randn(1, 6, 8, 8).numpy()
    figure = mosaic("maps", tiles, rows=["a"], columns="channel", pages=2, room=room)
    assert "channels 0–1 of 6" in figure.picture
    assert figure.picture.count("data:image/png") == 1 + pages
    assert left in figure.note


@pytest.mark.parametrize(
    ("diverging", "colours"),
    [
        (False, [(68, 1, 84), (59, 81, 139), (33, 145, 140), (115, 208, 86), (253, 231, 37)]),
        (True, [(5, 48, 97), (104, 171, 208), (247, 246, 246), (218, 104, 83), (103, 0, 31)]),
    ],
)
def test_colours_are_those_of_matplotlib(diverging: bool, colours: list[tuple[int, int, int]]) -> None:
    """Its colours at 0, 63, 127, 200 and 254 of 254."""
    found = palette(diverging=diverging)[[0, 63, 127, 200, 254]].astype(int)
    assert np.abs(found - np.array(colours)).max() <= 1


def test_the_scale_of_values_of_one_sign_can_be_centred_on_zero() -> None:
    below = np.array([[-2.0, -1.0]])
    ends = [re.findall(r"<span>(-?\d+)</span>", encoded(below, centre=centre)[1]) for centre in (None, 0.0)]
    assert ends == [["-2", "-1"], ["-2", "2"]]


# ---- numbers and names


def test_numbers_on_axes_are_short() -> None:
    shown = {
        0.88214: "0.8821", 1.2e-5: "1.2e-05", 12345: "12,345", 3.0: "3", 1e7: "1e+07", -0.5: "-0.5",
        math.inf: "∞", -math.inf: "−∞", None: "–", True: "True", "a": "a",
    }  # fmt: skip
    assert {value: text.number(value) for value in shown} == shown
    assert text.number(math.nan) == "NaN"
    assert [text.tick(value) for value in (15e3, 2e7, 1e-5, 0.5, 3e9, 1e15)] == [
        "15k", "20M", "1e-5", "0.5", "3G", "1e+15",
    ]  # fmt: skip


def test_durations_are_told_in_their_largest_units() -> None:
    found = [text.duration(seconds) for seconds in (0.94, 200, 59.96, 7500, 3 * 86400 + 7200)]
    assert found == ["0.9 s", "3 min 20 s", "60.0 s", "2 h 05 min", "3 d 2 h"]
    assert text.moment("2026-01-02T05:06:07+02:00") == "2026-01-02 03:06 UTC"
    assert text.moment(None) == text.moment("soon") == "–"
    start = "2026-01-01T00:00:00+00:00"
    assert seconds_between(start, "2026-01-01T00:01:00+00:00") == 60
    assert seconds_between("2026-01-01T00:01:00+00:00", start) == 0
    assert seconds_between(None, "x") is seconds_between("2026-01-01T00:00:00", start) is None


def test_names_have_no_control_characters() -> None:
    assert printable("a\u202eb\n\ud800") == r"a\u202eb\n\ud800"
    assert printable("a\x1b\n\tb", kept="\n\t") == "a\\x1b\n\tb"
    assert shortened("a" * 50 + "b" * 50, 20) == "a" * 10 + "…" + "b" * 10
    assert text.module_name("") == "(root)"
    assert text.module_name("a.b") == "a.b"


def test_tokens_show_the_space_before_them() -> None:
    assert text.token_name("  the", 5) == "␣␣the"
    assert text.token_name("", 5) == "#5"
    assert text.token_name("", -1) == "?"
    assert len(text.token_name("x" * 99, 5)) == 40


@pytest.mark.parametrize(
    ("names", "start", "shown"),
    [
        (["transformer.h.0.attn", "transformer.h.1.attn"], "transformer.h.", ["0.attn", "1.attn"]),
        (["a.long_name_0", "b.long_name_1"], "", ["…g_name_0", "…g_name_1"]),
        (["blocks.0.attn.out", "blocks.11.attn.out", "embed.attn.out"], "", ["blocks.0…", "…ocks.11…", "embed…"]),
        (["a.b", "a.b.c"], "a.", ["b", "b.c"]),
        (["0.001", "0.003"], "", ["0.001", "0.003"]),
        (["a.alone"], "", ["a.alone"]),
    ],
)  # fmt: skip
def test_names_never_lose_their_difference(names: list[str], start: str, shown: list[str]) -> None:
    assert text.fitted(names, 9) == (start, shown)
