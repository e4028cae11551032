"""A notice on jobs that are not finished."""

from __future__ import annotations

import json
from pathlib import Path

from report_pages import table

from hookrun.report import write_report


def test_it_can_be_made_while_jobs_run(copied: Path, page) -> None:
    status = json.loads((copied / "5/status.json").read_text())
    (copied / "5/status.json").write_text(
        json.dumps({**status, "status": "running", "ended": None, "exit_code": None})
    )
    (copied / "4/status.json").unlink()  # Hydra has created its directory, and nothing more
    (copied / "4/metrics.jsonl").unlink()
    with (copied / "5/metrics.jsonl").open("a") as file:
        file.write('{"split": "val", "accu')
    write_report(copied)
    found = page(copied)
    assert "2 jobs not finished" in found.text and "running 1" in found.text and "not started 1" in found.text
    assert [row["status"] for row in table(copied)][4:] == ["not started", "running"]
