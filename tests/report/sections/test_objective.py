"""The objective of a sweep, and its best job."""

from __future__ import annotations

import json
from pathlib import Path

from report_pages import table

from hookrun.report import write_report


def test_the_page_states_the_objective_and_marks_the_best_job(sweep: Path, copied: Path, page) -> None:
    best = max(table(sweep), key=lambda row: float(row["objective"]))
    found = page(sweep)
    assert f"maximize val/accuracy (best epoch of a run). Best: job {best['job']} with" in found.text
    assert found.source.count('<tr id="best">') == 1 and "Single batches" not in found.text
    for job in range(6):  # as written by an earlier version: no means of training, no result in the status
        path = copied / str(job)
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        kept = [line for line in lines if line.pop("of") == "batch" or line["split"] == "val"]
        (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in kept))
        status = json.loads((path / "status.json").read_text())
        del status["objective"]
        (path / "status.json").write_text(json.dumps(status))
    write_report(copied)
    old = page(copied)
    assert "Single batches, not means train/accuracy, train/loss" in old.text
    assert f"Best: job {best['job']} with" in old.text


def test_the_best_job_is_named_with_the_keys_that_it_was_given(sweep: Path, copied: Path, page) -> None:
    best = max(table(sweep), key=lambda row: float(row["objective"]))
    (copied / best["job"] / ".hydra/overrides.yaml").write_text(json.dumps(["seed=7"]))
    write_report(copied)
    assert ': <span class="mono">seed=7 </span>' in page(copied).source
