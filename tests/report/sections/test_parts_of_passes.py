"""Metrics by position and by sample."""

from __future__ import annotations

import json
from pathlib import Path

from hookrun.report.facts import read_facts
from hookrun.report.sections.parts_of_passes import SECTION as PARTS


def test_only_whole_numbers_from_0_are_positions_and_samples(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"status": "completed"}))
    found = []
    for of in ("position", "sample"):
        values = (0, 1, True, -1, 2**60)
        found += [{"split": "val", "of": of, of: value, "loss": 1.0} for value in values]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in found))
    parts = PARTS.build(read_facts(tmp_path))
    ((_, rows),) = parts["tables"]
    assert {sample for sample, *_ in rows} <= {0, 1, 2**60} and len(rows) in (2, 3)
    assert len(parts["figures"]) == 1
