"""The lens section on a page made from a stranger's files is bounded."""

from __future__ import annotations

import json
from pathlib import Path

from hookrun.report.facts import read_facts
from hookrun.report.sections.lens import MOST_CELLS, SECTION


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
        for sample in range(2)
        for part in range(200)
        for position in range(40)
    ]
    (tmp_path / "lens.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in cells))
    (tmp_path / "status.json").write_text(json.dumps({"status": "completed"}))
    found = SECTION.build(read_facts(tmp_path))
    (figure,) = found["figures"]
    assert "--rows:1;--columns:1" in figure.picture
    (table,) = found["tables"]
    assert len(table["rows"]) == 200 and len(table["columns"]) == MOST_CELLS // 200
    assert any("the first 30 positions" in note for note in found["notes"])
