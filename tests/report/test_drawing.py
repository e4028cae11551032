"""What is drawn of captured tensors, and that the drawings say what the numbers say."""

from __future__ import annotations

import base64
import io
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hookrun.report.captures import BINS, view_capture
from hookrun.report.draw.axes import axis_of
from hookrun.report.draw.charts import MOST_POINTS, Figure, Series, bars, lines
from hookrun.report.draw.palettes import palette
from hookrun.report.draw.pictures import mosaic
from hookrun.report.facts import Facts
from hookrun.report.records import over_steps
from hookrun.report.sampling import MOST_ROWS, draw, streams
from hookrun.report.units import idle_units
from hookrun.store.writer import CaptureWriter

VECTORS = ["distribution", "mean of 10 rows", "rows"]


def captured(folder: Path, *batches: torch.Tensor, by_sample: bool = True) -> Any:
    """The stream that batches, or firings, leave."""
    writer, first = CaptureWriter(folder), 0
    for step, batch in enumerate(batches):
        ids = range(first, first + len(batch)) if by_sample else None
        writer.add("h", "layer", batch, sample_ids=ids, epoch=0, step=step, call=0)
        first += len(batch)
    writer.close()
    [stream] = streams(folder)
    return stream


def drawn(folder: Path, *batches: torch.Tensor, by_sample: bool = True, hook: str = "forward") -> Any:
    facts = Facts(
        folder,
        status={},
        plan={"hooks": [{"name": "h", "hook": hook}]},
        model={"modules": [{"path": "layer", "class": "Tanh"}]},
    )
    return view_capture(folder, captured(folder, *batches, by_sample=by_sample), facts)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("batch", "titles"),
    [
        pytest.param(random(10, 3, 6, 6), ["distribution", "activation maps"], id="pictures"),
        pytest.param(random(10, 2, 3, 6, 6), ["distribution", "slices"], id="volumes"),
        pytest.param(random(10, 6, 6), ["distribution", "maps"], id="attention"),
        pytest.param(random(10, 7), VECTORS, id="vectors"),
        pytest.param(random(10, 300), VECTORS, id="long vectors"),
        pytest.param(random(10), ["distribution", "value"], id="numbers"),
        pytest.param(random(10, 7).bfloat16(), VECTORS, id="bfloat16"),
        pytest.param(random(10, 7).to(torch.float8_e4m3fn), VECTORS, id="float8"),
        pytest.param(random(10, 7) > 0, VECTORS, id="booleans"),
        pytest.param(torch.arange(70).reshape(10, 7), VECTORS, id="integers"),
        pytest.param(torch.view_as_complex(random(10, 7, 2)), VECTORS, id="complex"),
        pytest.param(torch.zeros(10, 7), VECTORS, id="zeros"),
    ],
)
def test_a_picture_that_fits_the_shape(tmp_path: Path, batch: torch.Tensor, titles: list[str]) -> None:
    found = drawn(tmp_path, batch)
    assert [figure.title for figure in found.figures] == titles
    assert found.problem == ""


def test_gradients_of_a_parameter_are_firings(tmp_path: Path) -> None:
    found = drawn(tmp_path, *random(6, 4, 5), by_sample=False, hook="grad")
    assert [figure.title for figure in found.figures] == ["distribution", "maps", "distribution over steps"]
    steps, norms = found.norms
    assert steps == [0, 1, 2, 3, 4, 5]
    assert norms == pytest.approx(random(6, 4, 5).flatten(1).norm(dim=1).tolist())


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        (torch.full((4, 3), math.nan), "none of its values is finite"),
        (torch.empty(4, 0), "it has no elements"),
    ],
    ids=["NaN", "nothing"],
)
def test_what_cannot_be_drawn_is_said(tmp_path: Path, batch: torch.Tensor, problem: str) -> None:
    found = drawn(tmp_path, batch)
    assert (found.problem, found.figures) == (problem, [])


def test_a_histogram_counts_finite_values_and_tells_the_rest(tmp_path: Path) -> None:
    batch = random(40, 50)
    batch[0, :7], batch[1, :3], batch[2:20] = math.nan, math.inf, 0.0
    [figure, *_] = drawn(tmp_path, batch).figures
    drawn_values = batch[batch.isfinite() & (batch != 0)]
    said = [int(count.replace(",", "")) for count in re.findall(r"to [^\"]*?\\n([\d,]+)", figure.picture)]
    assert said == np.histogram(drawn_values.double().numpy(), bins=BINS)[0].tolist()
    assert (
        "10 of 2,000 values are not finite" in figure.note
        and "45% are exactly 0 and not drawn" in figure.note
    )


def test_a_large_capture_is_drawn_from_rows_spread_over_all_shards(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path, shard_bytes=4_000)
    for step in range(100):
        rows = torch.full((20, 4), float(step))
        writer.add("h", "m", rows, sample_ids=range(20 * step, 20 * step + 20), epoch=0, step=step, call=0)
    writer.close()
    [stream] = streams(tmp_path)
    assert writer.shards > 20
    sample = draw(tmp_path, stream)
    assert 200 < len(sample.values) <= MOST_ROWS
    assert (sample.values[0, 0], sample.values[-1, 0]) == (0, 99)
    assert torch.equal(sample.values[:, 0].long(), sample.steps)
    assert sample.samples.tolist() == sorted(sample.samples.tolist())


def test_maps_have_a_pixel_for_each_element_and_one_scale(tmp_path: Path) -> None:
    tiles = np.zeros((2, 3, 4, 5), dtype=np.float32)
    tiles[1, 2, 3, 4] = 1
    figure = mosaic("maps", tiles, rows=["a", "b"], columns="")
    encoded = re.search(r"base64,([\w+/=]+)", figure.picture)
    assert encoded
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded[1]))))
    assert picture.shape == (2 * 5 - 1, 3 * 6 - 1)
    assert picture[-1, -1] == picture[picture != 255].max() == 254
    assert (picture[:4, :5] == 0).all() and (picture[4] == 255).all(), "a gap between tiles"


def test_large_maps_are_averaged() -> None:
    tile = random(1, 1, 130, 57).numpy()
    figure = mosaic("maps", tile, rows=["a"], columns="")
    encoded = re.search(r"base64,([\w+/=]+)", figure.picture)
    assert encoded
    assert Image.open(io.BytesIO(base64.b64decode(encoded[1]))).size == (29, 44)


@pytest.mark.parametrize(
    ("diverging", "colours"),
    [
        (False, [(68, 1, 84), (59, 81, 139), (33, 145, 140), (115, 208, 86), (253, 231, 37)]),
        (True, [(5, 48, 97), (104, 171, 208), (247, 246, 246), (218, 104, 83), (103, 0, 31)]),
    ],
    ids=["viridis", "RdBu_r"],
)
def test_colours_are_those_of_matplotlib(diverging: bool, colours: list[tuple[int, int, int]]) -> None:
    """Its colours at 0, 63, 127, 200 and 254 of 254."""
    found = palette(diverging=diverging)[[0, 63, 127, 200, 254]].astype(int)
    assert np.abs(found - np.array(colours)).max() <= 1


def points(figure: Figure) -> list[tuple[float, float]]:
    """Where the first curve goes, in units of the picture."""
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


def test_bars_stand_on_zero() -> None:
    figure = bars("t", [2.0, -1.0], x="x", y="y")
    [boxes] = re.findall(r'class="bar c0" d="([^"]*)"', figure.picture)
    (floor1, top1), (floor2, top2) = re.findall(r"M[\d.]+ ([\d.]+)V([\d.]+)", boxes)
    assert floor1 == floor2
    assert float(floor1) - float(top1) == pytest.approx(2 * (float(top2) - float(floor2)), abs=0.3)


@pytest.mark.cases(
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


# ---- units


def test_dead_saturated_and_constant_units_are_named() -> None:
    rows = random(40, 6).tanh()
    rows[:, 1], rows[:, 3], rows[:, 5] = 0, 0.25, 1
    rows[:39, 2] = 1
    found = {units.what: units.which for units in idle_units(rows, "Tanh")}
    assert found == {"dead": (1,), "saturated": (2, 5), "constant": (3, 5)}
    assert "saturated" not in {units.what for units in idle_units(rows, "Linear")}


def test_the_units_of_pictures_are_channels() -> None:
    rows = random(10, 4, 3, 3).relu()
    rows[:, 2] = 0
    [units] = idle_units(rows, "ReLU")
    assert (units.what, units.kind, units.which, units.total) == ("dead", "channel", (2,), 4)


def test_a_few_rows_prove_nothing() -> None:
    assert idle_units(torch.zeros(3, 5), "ReLU") == []


def test_attention_is_recognised(tmp_path: Path) -> None:
    heads = drawn(tmp_path / "heads", random(10, 4, 6, 6).softmax(-1)).figures[1]
    assert heads.title == "attention maps" and "heads 0–3" in heads.picture
    assert drawn(tmp_path / "one", random(10, 6, 6).softmax(-1)).figures[1].title == "attention maps"
    assert drawn(tmp_path / "none", random(10, 4, 6, 6)).figures[1].title == "activation maps"


def test_the_mean_beside_a_histogram_counts_the_zeros_that_it_does_not_draw(tmp_path: Path) -> None:
    batch = random(50, 20).relu()
    [figure, *_] = drawn(tmp_path, batch).figures
    assert f"mean {float(batch.mean()):.4g}" in figure.note


def test_the_map_of_a_deep_net_shows_every_layer_zeros_apart_and_names_the_outliers() -> None:
    points = {f"layers.{n}": ([0.0, 1.0], [10.0 ** (n - 205), 10.0 ** (n - 205)]) for n in range(206)}
    points["layers.3"] = ([0.0, 1.0], [0.0, 0.0])
    points["layers.4"] = ([0.0, 1.0], [1e-3, math.nan])
    points["layers.5"] = ([0.0, 1.0], [math.inf, 1e-3])
    [figure] = over_steps("gradient norm", points, "step", "norm", by_layer=True)
    encoded = re.search(r"base64,([\w+/=]+)", figure.picture)
    assert encoded
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded[1]))).convert("RGB")).astype(int)
    assert picture.shape[:2] == (206, 2)
    greys = len({tuple(pixel) for pixel in picture[6:, 0]})
    assert greys > 100, "a colour for each magnitude"
    assert len({tuple(picture[row, column]) for row, column in ((3, 0), (4, 1), (5, 0))}) == 3
    assert figure.scale and all(name in figure.scale for name in ("exactly 0", "NaN", "infinite"))
    said = "\n".join(figure.facts)
    assert "largest: layers.205 1 (step 0), layers.204 0.1 (step 0)" in said
    assert "exactly 0 throughout, 1 layer: layers.3" in said
    assert "NaN from step 1, 1 layer: layers.4" in said and "infinite from step 0, 1 layer: layers.5" in said
    many = {f"m{n}": ([0.0, 1.0], [1.0, float(n == 998)]) for n in range(999)}
    [figure] = over_steps("gradient norm", many, "step", "norm", by_layer=True)
    assert "a row is the largest of 3 layers" in figure.note and "--rows:333;" in figure.picture
    assert "m0 … m2" in figure.picture and "m990 … m992" in figure.picture, "names where there is room"


def test_the_figures_of_a_histogram_are_of_all_rows(tmp_path: Path) -> None:
    values = random(3000, 4)
    values[1234, 2], values[77, 1] = 1e6, math.nan
    writer = CaptureWriter(tmp_path, shard_bytes=20_000)
    writer.add("h", "m", values, sample_ids=range(3000), epoch=0, step=0, call=0)
    writer.close()
    [stream] = streams(tmp_path)
    figure = view_capture(tmp_path, stream, Facts(tmp_path, {})).figures[0]
    finite = values[values.isfinite()].double().numpy()
    assert f"mean {finite.mean():.4g}, std {finite.std():.4g}, min " in figure.note
    assert "max 1,000,000" in figure.note or "max 1e+06" in figure.note
    assert "12,000 values" in figure.note and "1 of 12,000 values are not finite" in figure.note
