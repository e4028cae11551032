"""How a run of two nodes ends: what one of them wrote is seen by the other, and one that dies ends the other."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from two_nodes import Disk, agents
from warm_processes import WarmProcesses

import hookrun
from hookrun.store.verify import verify

SMALL = (
    "model=cnn", "data=digits", "data.batch_size=9", "compute=ddp", "compute.device=cpu", "compute.threads=1",
    "train.epochs=1", "train.limit_batches=12", "train.log_every=1",
    "+hooks.rows={select: fc, hook: forward, action: capture}",
    "+hooks.seen={select: relu1, hook: forward, action: stats}",
)  # fmt: skip


@pytest.mark.parametrize("comes", ["yes", "no"])
def test_done_means_that_the_files_of_all_nodes_are_there(
    comes, warm: WarmProcesses, disk: Disk, tmp_path, free_port: Any
) -> None:
    (tmp_path / "late.py").write_text(LATE)
    argv = (*SMALL, f"compute.timeout={60 if comes == 'yes' else 8}", f"hydra.run.dir={disk.path}/run")
    program = (str(tmp_path / "late.py"),)
    with agents(
        warm, disk, free_port(), *argv, own_disk=False, program=program, env={"COMES": comes}
    ) as nodes:
        codes = [node.wait() for node in nodes]
        said = [node.said() for node in nodes]
    run = hookrun.open_run(disk.folders[0] / "run")
    if comes == "yes":
        assert codes == [0, 0], said
        assert run.status["status"] == "done"
        assert len(run.captures["rows"]["fc"]) == 2 * 12 * 9
        assert verify(run.path).bad == []
        return
    assert codes == [1, 1], said
    reason = run.status["reason"]
    assert re.search(
        r"rank 1 on \S+ wrote captures/index_1.jsonl \(\d[\d,]* bytes\), which rank 0 does not", reason
    )
    assert run.status["status"] == "failed"
    assert "has to be on a disk that all nodes share" in reason
    assert "which rank 0 does not see" in said[0]
    assert "rank 1 failed" not in said[0]


LONG = (*SMALL, "train.epochs=2", "train.checkpoint.every.steps=1", "compute.timeout=120")


def wait_for(folder: Path, count: int) -> None:
    end = time.monotonic() + 120
    while len(list(folder.glob("checkpoints/state_*"))) < count:
        assert time.monotonic() < end, f"{folder} has no {count} states"
        time.sleep(0.02)


@pytest.mark.parametrize("dies", [0, 1])
def test_the_last_state_outlives_a_node_that_dies(
    dies: int, warm: WarmProcesses, disk: Disk, workers: Any, same: Any, tmp_path: Path, free_port: Any
) -> None:
    """The other ends long before `compute.timeout`; what it has left is resumed, bit by bit as if nothing had been."""
    path = disk.folders[0] / "run"
    with agents(warm, disk, free_port(), *LONG, f"hydra.run.dir={disk.path}/run", own_disk=False) as nodes:
        wait_for(path, 2)
        nodes[dies].kill()
        since = time.monotonic()
        other = nodes[1 - dies]
        assert other.wait() == 1, other.said()
        assert time.monotonic() - since < 60
        said = other.said()
    status = hookrun.open_run(path).status
    if dies:
        assert status["status"] == "failed"
        assert "rank 1 is gone" in status["reason"]
        assert "to go on: hookrun resume=" in said
    else:
        assert status["status"] == "running"
        assert "rank 0, or torchrun, is gone" in said
    ended = workers.run(tmp_path, f"resume={path}")
    assert ended.codes == [0, 0], ended.said
    assert "resumed from state_0000" in ended.said[0], ended.said
    assert workers.run(tmp_path, *LONG, "hydra.run.dir=whole").codes == [0, 0]
    resumed = hookrun.open_run(path)
    whole = hookrun.open_run(tmp_path / "whole")
    same.weights(whole, resumed, atol=0.0)
    assert resumed.metrics == whole.metrics
    assert resumed.stats == whole.stats
    assert torch.equal(same.rows_of(resumed, "rows", "fc")[:], same.rows_of(whole, "rows", "fc")[:])
    assert verify(path).bad == []


# When rank 1 has said what it wrote, its files are moved away, and some come back later.
LATE = """
import os, sys, threading

from hookrun.cli import main
from hookrun.store.run_dir import RunDir

said = RunDir._indexes


def say_and_hide(run):
    indexes = said(run)
    captures = run.path / "captures"
    for path in [*captures.glob("*_1.jsonl"), *captures.glob("1_*")]:
        path.rename(run.path / path.name)
        if os.environ["COMES"] == "yes":
            threading.Timer(1, os.rename, (run.path / path.name, path)).start()
    return indexes


if os.environ["RANK"] == "1":
    RunDir._indexes = say_and_hide
sys.exit(main())
"""
