"""A sweep that is killed and resumed ends like one that was never interrupted."""

from __future__ import annotations

import csv
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
from warm_processes import WarmProcesses

import hookrun
from hookrun.cli import main

SWEEP = [
    "-m", "model=mlp", "+hooks.features={select: layers.0, hook: forward, action: capture}", "seed=1,2,3",
    "train.limit_batches=2", "train.epochs=2", "compute.device=cpu", "compute.threads=1",
]  # fmt: skip


def table(sweep: Path) -> list[dict[str, str]]:
    with (sweep / "sweep.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{key: value for key, value in row.items() if key not in ("started", "seconds")} for row in rows]


PROGRAM = "import sys; from hookrun.cli import main; sys.exit(main(sys.argv[1:]))"


def test_killed_in_a_job_and_resumed_by_two_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: WarmProcesses
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*SWEEP, "hydra.sweep.dir=whole"]) == 0
    killed = warm.start(PROGRAM, *SWEEP, "hydra.sweep.dir=cut")
    while not Path("cut/1/metrics.jsonl").exists() and killed.poll() is None:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not Path("cut/2").exists()
    done = Path("cut/0/status.json").read_bytes()
    with tempfile.TemporaryFile("w+") as one, tempfile.TemporaryFile("w+") as other:
        twice = [warm.start(PROGRAM, "-m", "resume=cut", stderr=file) for file in (one, other)]
        codes = [each.wait() for each in twice]
        one.seek(0), other.seek(0)
        said = [one.read(), other.read()]
    assert sorted(codes) in ([0, 2], [0, 0]), said  # the second may start when the first is over
    refused = [text for text, code in zip(said, codes, strict=True) if code]
    assert all("is being written by" in text for text in refused), refused
    assert Path("cut/0/status.json").read_bytes() == done
    assert table(Path("cut")) == table(Path("whole"))
    for job in range(3):
        ours, theirs = (hookrun.open_run(tmp_path / name / str(job)) for name in ("cut", "whole"))
        assert ours.metrics == theirs.metrics and ours.status["status"] == "done"
        found, wanted = ours.captures["features"]["layers.0"], theirs.captures["features"]["layers.0"]
        assert torch.equal(found[:], wanted[:]) and torch.equal(found.sample_ids, wanted.sample_ids)
        assert sorted(os.listdir(ours.path)) == sorted(os.listdir(theirs.path))
