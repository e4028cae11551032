"""Jobs that failed or were interrupted."""

from __future__ import annotations

from pathlib import Path

from report_pages import SHORT, table

from hookrun.cli import main


def test_jobs_that_failed_are_listed_with_their_reasons(folder: Path, page) -> None:
    assert main([*SHORT, "hydra.sweep.dir=unlucky", "train.optimizer.name=SGD,SparseAdam"]) == 1
    found, rows = page(folder / "unlucky"), table(folder / "unlucky")
    assert "done 1" in found.text and "failed 1" in found.text
    assert "1 job did not end well" in found.text
    assert "SparseAdam does not support dense gradients" in found.text
    assert [(row["status"], row["exit_code"]) for row in rows] == [("done", "0"), ("failed", "1")]
    assert "SparseAdam" in rows[1]["reason"]
