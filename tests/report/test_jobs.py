"""The jobs of a sweep, each read from its directory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from report_pages import table

from hookrun.report import write_report
from hookrun.report.jobs import find_jobs


def test_directories_of_other_machines_and_depths_are_found(copied: Path) -> None:
    (copied / "lr=0.1").mkdir()
    (copied / "5").rename(copied / "lr=0.1" / "seed=1")
    write_report(copied)
    names = [job.name for job in find_jobs(copied)]
    assert set(names) == {"0", "1", "2", "3", "4", "lr=0.1/seed=1"}


def test_a_job_that_continues_or_is_edited_after_a_page_is_read_again(copied: Path) -> None:
    before = find_jobs(copied)
    assert all(job.status == "done" for job in before)
    path = copied / before[0].name / "status.json"
    path.write_text(path.read_text().replace('"done"', '"failed"'))
    metrics = copied / before[1].name / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"loss": ', '"loss": 1'))  # another number
    shutil.rmtree(copied / before[2].name)
    after = find_jobs(copied)
    assert [job.name for job in after] == [job.name for job in before if job.name != before[2].name]
    assert after[0].status == "failed"
    assert after[1].metrics["val/loss"] != before[1].metrics["val/loss"]
    assert after[2:] == before[3:]


def test_numbers_are_in_order(copied: Path) -> None:
    (copied / "5").rename(copied / "10")
    assert [job.name for job in find_jobs(copied)] == ["0", "1", "2", "3", "4", "10"]


def test_a_killed_job_is_not_shown_as_running(copied: Path, page) -> None:
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    status = json.loads((copied / "5/status.json").read_text())
    status |= {"status": "running", "ended": None, "exit_code": None, "pid": int(gone.stdout)}
    (copied / "5/status.json").write_text(json.dumps(status))
    write_report(copied)
    text = page(copied).text
    assert "cut off 1" in text and "1 job did not end well" in text and "not finished" not in text
    assert table(copied)[5]["status"] == "cut off"


def test_the_page_is_written_despite_a_partly_written_file_of_one_job(copied: Path, page) -> None:
    (copied / "3/.hydra/overrides.yaml").write_text('- "train.optimizer.lr=0.0')
    (copied / "4/status.json").write_text("[1, 2]")
    (copied / "5/metrics.jsonl").write_text("[1, 2]\n3\n")
    write_report(copied)
    rows = table(copied)
    assert (len(rows), rows[3]["train.optimizer.lr"], rows[5]["val/loss"]) == (6, "", "")
