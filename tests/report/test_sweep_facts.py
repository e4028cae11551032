"""The content of a sweep's directory for its page."""

from __future__ import annotations

import shutil
from pathlib import Path

from report_pages import table

from hookrun.report import write_report
from hookrun.report.jobs import find_jobs
from hookrun.report.sweep_facts import swept_keys


def test_keys_with_one_value_were_not_swept(sweep: Path) -> None:
    assert swept_keys(find_jobs(sweep)) == ["train.optimizer.lr", "seed"]


def test_a_sweep_that_has_just_begun_has_its_keys_and_its_number_of_jobs(copied: Path, page) -> None:
    for job in range(1, 6):
        shutil.rmtree(copied / str(job))
    write_report(copied)
    text = page(copied).text
    assert "not started 5" in text and "5 jobs not finished" in text
    assert [(row["train.optimizer.lr"], row["seed"]) for row in table(copied)] == [("0.001", "0")]
    (copied / "sweep.json").unlink()  # as written by an earlier version
    write_report(copied)
    assert "not started 5" in page(copied).text
    (copied / "multirun.yaml").write_text("hydra: [half")
    write_report(copied)
    assert "not finished" not in page(copied).text
