"""Statistics with lists: histograms, quantiles, counts, and numbers of each index of a dimension."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_curves import made_run, planned, record, shown

from hookrun.report.distributions import distributions
from hookrun.report.draw.charts import Figure


def drawn(name: str, values: list[Any], quantiles: tuple[str, ...] = ()) -> list[Figure]:
    """The pictures of a statistic at one module, with a value for each step."""
    records = [record("h", "fc", step, **{name: value}) for step, value in enumerate(values)]
    return list(distributions(records, {}, quantiles, 40))


def rows(figure: Figure) -> list[list[float]]:
    assert figure.table
    return [[float(cell.replace(",", "")) for cell in row] for row in figure.table.rows]


def histogram(x: np.ndarray, bins: int = 64) -> dict[str, Any]:
    counts, edges = np.histogram(x, bins)
    return {"counts": counts.tolist(), "edges": edges.tolist()}


def test_a_histogram_is_a_row_for_each_step() -> None:
    rng = np.random.default_rng(0)
    samples = [rng.normal(step, step + 1, 5000) for step in range(5)]
    [figure] = drawn("histogram", [histogram(x) for x in samples])
    assert figure.picture.count('class="ridge') == 5
    for step, (x, row) in enumerate(zip(samples, rows(figure), strict=True)):
        counts, edges = np.histogram(x, 64)
        fullest = counts.argmax()
        expected = [step, x.min(), edges[fullest : fullest + 2].mean(), x.max()]
        assert np.allclose(row, expected, rtol=1e-3)


def test_a_histogram_of_any_step_is_drawn() -> None:
    for step in (0, 1, 2**53):
        [figure] = distributions([record("h", "fc", step, histogram=histogram(np.arange(9.0)))], {}, (), 40)
        assert rows(figure) == [pytest.approx([step, 0, 1 / 16, 8], rel=1e-3)]


def test_rows_of_a_ridge_share_one_axis_of_values() -> None:
    """A bin of a narrow histogram is at its own value, not at that of the wide one."""
    wide = {"counts": [1, 1, 1, 1], "edges": [0, 1, 2, 3, 4]}
    narrow = {"counts": [0, 1], "edges": [2.9, 3.0, 3.1]}
    [figure] = drawn("histogram", [wide, narrow])
    narrow_path, wide_path = re.findall(r'<path class="ridge c0" d="([^"]+)"', figure.picture)
    peak = min(re.findall(r"L([\d.]+) ([\d.]+)", narrow_path), key=lambda point: float(point[1]))
    ends = [float(x) for x, _ in re.findall(r"[ML]([\d.]+) ([\d.]+)", wide_path)]
    share = (float(peak[0]) - ends[0]) / (ends[-1] - ends[0])
    assert 4 * share == pytest.approx(3.05, abs=0.1)


BAD = [
    {"counts": [1, 2], "edges": [0, 1]},
    {"counts": [1, -2], "edges": [0, 1, 2]},
    {"counts": [1, 2], "edges": [0, 2, 1]},
    {"counts": [1, 2], "edges": [0, math.nan, 2]},
    {"counts": ["<b>", 2], "edges": [0, 1, 2]},
    {"counts": {"a": 1}, "edges": None},
    {"counts": [10**90, 10**90], "edges": [-(10**90), 0, 10**90]},
    {},
    ["<script>", None],
    [{"counts": [1], "edges": "x"}, 3],
]


def test_what_is_not_valid_is_shown_as_text(tmp_path: Path) -> None:
    good = histogram(np.arange(10.0))
    records = [record("h", "fc", step, histogram=value) for step, value in enumerate([*BAD, good])]
    page = shown(made_run(tmp_path / "run", records))
    assert page.source.count('class="ridge') == 1
    assert page.source.count("histogram=") == len(BAD)
    assert page.tags.count("script") == 1


def test_a_statistic_of_nothing_is_not_drawn() -> None:
    nothing = {"counts": [0, 0], "edges": [0, 1, 2]}
    assert not drawn("histogram", [nothing, nothing])
    assert not drawn("mean", [[], []])
    [figure] = drawn("histogram", [nothing, histogram(np.arange(10.0))])
    assert rows(figure)[0][0] == 1


def test_numbers_out_of_reach_are_drawn_quietly() -> None:
    values = [[math.inf, -math.inf, math.nan, 1.7e308, -1.7e308] * 60 for _ in range(3)]
    for name in ("quantiles", "counts", "mean"):
        records = [
            record("h", layer, step, **{name: value}) for layer in "ab" for step, value in enumerate(values)
        ]
        assert all(figure.picture for figure in distributions(records, {}, (), 40))


def test_ten_thousand_bins_leave_the_page_small(tmp_path: Path) -> None:
    many = histogram(np.random.default_rng(0).normal(size=20_000), 10_000)
    records = [record("h", f"fc{layer}", step, histogram=many) for layer in range(8) for step in range(4)]
    records += [record("h", "fc0", 4, counts=list(range(10_000)), mean=[0.5] * 10_000)]
    page = shown(made_run(tmp_path / "run", records))
    assert page.source.count('class="ridge') == 8 * 4
    assert len(page.source) < 400_000


def test_quantiles_are_curves() -> None:
    values = [[step - 1.0, float(step), step + 2.0] for step in range(4)]
    [figure] = drawn("quantiles", values, ("0.05", "0.5", "0.95"))
    assert figure.legend == ("0.05", "0.5", "0.95")
    assert rows(figure) == [[step, *row] for step, row in enumerate(values)]


def test_the_plan_names_the_quantiles(tmp_path: Path) -> None:
    records = [record("h", "fc", step, quantiles=[5, 0, 1]) for step in range(3)]
    hook = planned("h", ["fc"], of=["mean", {"quantiles": [0.9, 0.1, 0.5]}])
    page = shown(made_run(tmp_path / "run", records, [hook]))
    assert re.findall(r"<i></i>([\d.]+)</span>", page.source) == ["0.9", "0.1", "0.5"]


def test_numbers_of_units_are_a_map_over_steps() -> None:
    values = np.array([[10.0 * step + unit for unit in range(5)] for step in range(3)])
    values[:, 3] = 0
    [figure] = drawn("mean", values.tolist())
    assert figure.title == "mean of each unit of fc"
    assert figure.table
    assert figure.table.heads == ("", "0", "1", "2")
    assert rows(figure) == [[unit, *values[:, unit]] for unit in range(5)]
    assert figure.facts == ("exactly 0 throughout, 1 unit: 3",)


def test_numbers_of_units_of_one_step_are_points() -> None:
    [figure] = drawn("mean", [[3.0, 1.0, 2.0]])
    assert figure.title == "mean of each unit of fc, step 0"
    assert rows(figure) == [[0, 3], [1, 1], [2, 2]]


def test_a_list_of_each_unit_is_drawn_of_the_last_step() -> None:
    last = [[0, 1], [1, 2], [2, 3], [3, 4]]
    [figure] = drawn("quantiles", [[[9, 9]] * 4, last])
    assert figure.title == "quantiles of fc, step 1"
    assert rows(figure) == [[unit, *of_unit] for unit, of_unit in enumerate(last)]


def test_the_load_of_experts_is_a_map_of_layers() -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 50, (3, 4, 8))  # steps, layers, experts
    lists = {"dead": [3], "hot": []}
    records = [
        record("moe", f"layers.{layer}", step, "expert_load", counts=counts[step, layer].tolist(), **lists)
        for step in range(3)
        for layer in range(4)
    ]
    figure = next(distributions(records, {}, (), 40))
    total = counts.sum(0)
    assert figure.table
    shares = [[float(cell) for cell in row[1:]] for row in figure.table.rows]
    assert np.allclose(shares, total / total.sum(1, keepdims=True), rtol=1e-3)
    assert figure.title == "share of each expert by layer"
    assert figure.facts[:2] == (
        "dead at the end in 4 layers: layers.0: [3], layers.1: [3], layers.2: [3], layers.3: [3]",
        "an even share is 12.5%",
    )


def test_numbers_beside_lists_are_curves(tmp_path: Path) -> None:
    records = [record("h", "fc", step, mean=step, histogram=histogram(np.arange(9.0))) for step in range(3)]
    page = shown(made_run(tmp_path / "run", records))
    assert page.open_curves == 1
    assert page.source.count('class="ridge') == 3
    assert "the first recorded lines" not in page.source
