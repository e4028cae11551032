"""The section of the lens on a run's page."""

from __future__ import annotations

import json
from pathlib import Path

from report_pages import write_lines

from hookrun.report.facts import read_facts
from hookrun.studies.lens import page


def test_sizes_in_the_files_are_bounded(tmp_path: Path) -> None:
    about = {"split": "val", "module": "blocks.0.attn", "kind": "heads", "layer": 0, "logit_difference": 1.0}
    strange = [{**about, "head": head} for head in (-5, -1, "x", 1.5, True, 10**9)]
    strange += [{**about, "layer": layer, "head": 1} for layer in ("x", -1, True)]
    strange.append({**about, "module": 3, "head": 1})
    write_lines(tmp_path / "metrics.jsonl", [{**about, "head": 0}, *strange])
    cell = {"split": "val", "kind": "heads", "layer": 0, "token": 1, "text": "a", "top": [[1, "a", 0.5]]}
    cells = [
        {**cell, "sample": sample, "part": f"p{part}", "position": position}
        for sample in range(2)
        for part in range(200)
        for position in range(40)
    ]
    write_lines(tmp_path / "lens.jsonl", cells)
    (tmp_path / "status.json").write_text(json.dumps({"status": "completed"}))
    found = page.build(read_facts(tmp_path))
    assert found is not None
    (figure,) = found["figures"]
    assert "--rows:1;--columns:1" in figure.picture
    (shown,) = found["tables"]
    assert len(shown["rows"]) == 200
    assert len(shown["columns"]) == page.MOST_CELLS // 200
    assert any("the last 30 positions" in note for note in found["notes"])
