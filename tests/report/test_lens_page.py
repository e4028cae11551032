"""The lens section on a page made from a stranger's files: bounded, and every number drawn or left out."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from hookrun.report.draw.axes import axis_of
from hookrun.report.draw.charts import Series, bars, lines
from hookrun.report.facts import read_facts
from hookrun.report.sections.lens import MOST_CELLS, SECTION
from hookrun.report.sections.parts_of_passes import SECTION as PARTS


def test_places_and_sizes_in_the_files_are_bounded(tmp_path: Path) -> None:
    about = {"split": "val", "module": "blocks.0.attn", "kind": "heads", "layer": 0, "logit_difference": 1.0}
    strange = [{**about, "head": head} for head in (-5, -1, "x", 1.5, True, 10**9)]
    strange += [{**about, "layer": layer, "head": 1} for layer in ("x", -1, True)]
    strange.append({**about, "module": 3, "head": 1})
    metrics = [{**about, "head": 0}, *strange]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in metrics))
    cell = {"split": "val", "kind": "heads", "layer": 0, "token": 1, "text": "a", "top": [[1, "a", 0.5]]}
    cells = [
        {**cell, "sample": sample, "part": f"p{part}", "position": position}
        for sample in range(3)
        for part in range(200)
        for position in range(40)
    ]
    (tmp_path / "lens.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in cells))
    (tmp_path / "status.json").write_text(json.dumps({"status": "completed"}))
    found = SECTION.build(read_facts(tmp_path))
    (figure,) = found.figures
    assert "--rows:1;--columns:1" in figure.picture
    (table,) = found.tables
    assert len(table.rows) == 200 and len(table.columns) == MOST_CELLS // 200
    assert any("the first 30 positions" in note for note in found.notes)


def test_only_whole_numbers_from_0_are_positions_and_samples(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"status": "completed"}))
    found = []
    for of in ("position", "sample"):
        values = (0, 1, True, -1, 2**60)
        found += [{"split": "val", "of": of, of: value, "loss": 1.0} for value in values]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in found))
    parts = PARTS.build(read_facts(tmp_path))
    (table,) = parts.tables
    assert {sample for sample, *_ in table.rows} <= {0, 1, 2**60} and len(table.rows) in (2, 3)
    assert len(parts.figures) == 1


def test_an_axis_holds_numbers_of_any_size() -> None:
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
