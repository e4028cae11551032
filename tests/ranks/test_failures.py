"""What happens on one rank is reported on all: a failed check, a killed rank, a signal."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import hookrun
from hookrun.cli import main

SMALL = ("model=cnn", "data=digits", "compute.device=cpu", "compute.threads=1", "compute.strategy=ddp")
TRIPS = "+hooks.trips={select: fc, hook: forward, action: check, max: -1000, when: {rank: 1}"


def test_a_check_on_one_rank_ends_the_run_on_all(workers: Any, tmp_path: Path) -> None:
    argv = (*SMALL, "compute.timeout=60", "train.epochs=1")
    ended = workers.run(tmp_path, *argv, TRIPS + ", policy: stop}", "hydra.run.dir=stop")
    assert ended.codes == [3, 3], ended.said
    run = hookrun.open_run(tmp_path / "stop")
    assert run.status["status"] == "stopped"
    assert "rank 1: hook 'trips' on fc (Linear): expected every element" in run.status["reason"]
    (tripped,) = (line for line in run.stats if line["hook"] == "trips")
    assert tripped["of_rank"] == 1 and len(tripped["samples"]) == 32
    assert f"among the samples {tripped['samples'][0]}, " in run.status["reason"]
    (state,) = (tmp_path / "stop" / "checkpoints").glob("state_*/state.json")
    state.write_text("{")
    since = time.monotonic()
    ended = workers.run(tmp_path, "resume=stop")
    assert ended.codes == [2, 2] and time.monotonic() - since < 50, "what rank 0 refuses is refused by all"
    assert "has no undamaged state" in ended.said[0]
    ended = workers.run(tmp_path, *argv, TRIPS + "}", "hydra.run.dir=error", leave=True)
    assert ended.codes == [3, 3], ended.said
    assert "rank 1 failed: hook 'trips' (forward, check) on fc" in ended.said[0]
    status = hookrun.open_run(tmp_path / "error").status
    assert (status["status"], status["exit_code"]) == ("failed", 3)
    assert "rank 1 failed: hook 'trips'" in status["reason"]


def test_a_rank_that_is_killed_or_interrupted_ends_the_others(workers: Any, tmp_path: Path) -> None:
    """The others say which rank is gone; a signal for one rank ends all, after the step."""
    argv = (*SMALL, "compute.timeout=20", "train.epochs=100000")
    workers.start(tmp_path, *argv, "hydra.run.dir=signalled")
    wait_for(tmp_path / "signalled" / "metrics.jsonl")
    os.kill(workers.pids[1], signal.SIGTERM)
    ended = workers.end()
    assert ended.codes == [143, 143], ended.said
    assert hookrun.open_run(tmp_path / "signalled").status["status"] == "interrupted"
    workers.start(tmp_path, *argv, "hydra.run.dir=killed")
    wait_for(tmp_path / "killed" / "metrics.jsonl")
    workers.kill(1)
    since = time.monotonic()
    assert workers.end(only=0).codes == [1]
    assert time.monotonic() - since < 20
    status = hookrun.open_run(tmp_path / "killed").status
    assert status["status"] == "failed"
    assert "rank 1 is gone, or did not answer" in status["reason"]


def wait_for(path: Path) -> None:
    end = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < end, f"{path} is not written"
        time.sleep(0.05)


def test_an_edit_on_some_ranks_only_is_refused(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    hook = "+hooks.h={select: fc, hook: forward, action: scale, factor: 2, when: {rank: 0}}"
    assert main([*SMALL, "task=plan", hook]) == 2
    assert "hooks.h.when.rank: scale changes values" in capsys.readouterr().err
    for wrong in ("-1", "true", "[]", "x"):
        assert main([*SMALL, "task=plan", TRIPS.replace("rank: 1", f"rank: {wrong}") + "}"]) == 2
        assert "hooks.trips.when.rank" in capsys.readouterr().err
