"""How a run ended, unless it is done."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from hookrun.report import write_report


def test_the_page_of_a_failed_run_says_why(run, page, capsys) -> None:
    path = run("model=mlp", "train.limit_batches=1", "train.optimizer.name=SparseAdam", code=1)
    said = capsys.readouterr()
    assert f"report: {path}/report.html" in said.out
    found = page(path)
    assert "It failed RuntimeError: SparseAdam does not support dense gradients" in found.text
    assert "Traceback (most recent call last)" in found.text


def test_the_page_of_a_run_that_was_cut_off_says_so(observed: Path, tmp_path: Path, page) -> None:
    path = tmp_path / "run"
    shutil.copytree(observed, path)
    done = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    status = json.loads((path / "status.json").read_text())
    status |= {"status": "running", "ended": None, "exit_code": None, "pid": int(done.stdout)}
    (path / "status.json").write_text(json.dumps(status))
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"split": "val", "lo')  # a partly written line
    write_report(path)
    assert "cut off" in page(path).text


def test_a_run_that_is_still_running_has_a_page(tmp_path: Path, page) -> None:
    status = {"status": "running", "reason": "", "started": "2026-01-01T00:00:00+00:00", "ended": None}
    (tmp_path / "status.json").write_text(json.dumps({**status, "pid": os.getpid(), "exit_code": None}))
    write_report(tmp_path)
    assert "The run is not finished" in page(tmp_path).text
