"""Jobs that failed or were interrupted."""

from __future__ import annotations

import json
import re
from pathlib import Path

from report_pages import SHORT, table

from hookrun.cli import main
from hookrun.report import write_report


def test_jobs_that_failed_are_listed_with_their_reasons(folder: Path, page) -> None:
    assert main([*SHORT, "hydra.sweep.dir=unlucky", "train.optimizer.name=SGD,SparseAdam"]) == 1
    found, rows = page(folder / "unlucky"), table(folder / "unlucky")
    assert "done 1" in found.text and "failed 1" in found.text
    assert "1 job did not end well" in found.text
    assert "SparseAdam does not support dense gradients" in found.text
    assert [(row["status"], row["exit_code"]) for row in rows] == [("done", "0"), ("failed", "1")]
    assert "SparseAdam" in rows[1]["reason"]


def test_a_failed_job_is_listed_with_the_keys_that_it_was_given(copied: Path, page) -> None:
    status = json.loads((copied / "0/status.json").read_text()) | {"status": "failed", "exit_code": 1}
    (copied / "0/status.json").write_text(json.dumps(status))
    (copied / "0/.hydra/overrides.yaml").write_text(json.dumps(["seed=7"]))
    write_report(copied)
    rows = re.findall('<td class="mono long">(.*?)</td>', page(copied).source)
    assert [row.strip() for row in rows] == ["seed=7"]
