"""What happens on one rank is reported on all, and changes no collective: failed checks, killed ranks, signals."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

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
    assert tripped["of_rank"] == 1
    assert len(tripped["samples"]) == 32
    assert f"among the samples {tripped['samples'][0]}, " in run.status["reason"]
    (state,) = (tmp_path / "stop" / "checkpoints").glob("state_*/state.json")
    state.write_text("{")
    since = time.monotonic()
    ended = workers.run(tmp_path, "resume=stop")
    assert ended.codes == [2, 2]
    assert time.monotonic() - since < 50, "what rank 0 refuses is refused by all"
    assert "has no undamaged state" in ended.said[0]
    ended = workers.run(tmp_path, *argv, TRIPS + "}", "hydra.run.dir=error", leave=True)
    assert ended.codes == [3, 3], ended.said
    assert "rank 1 failed: hook 'trips' (forward, check) on fc" in ended.said[0]
    status = hookrun.open_run(tmp_path / "error").status
    assert status["status"] == "failed"
    assert status["exit_code"] == 3
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


CHECK = "+hooks.check={select: conv1, hook: forward_pre, action: check, policy: stop}"
KEEPS = "+hooks.keeps={select: conv1, hook: forward, action: capture, keep: {reservoir: 2}}"
STEPS = "+hooks.steps={select: fc.weight, hook: optimizer_step_pre, action: stats, when: {rank: 1}}"
BROKEN = (
    "+hooks.broken={select: fc.bias, hook: grad, action: scale, factor: nan, index: '0', when: {step: 1}}"
)
NOISE = "+hooks.noise={select: conv2, hook: forward, action: noise, std: 0.1}"
CASES = [
    ("fsdp", 2, 8, ["train.on_nonfinite=skip", STEPS, BROKEN], 0),  # step 1: in the shard of rank 0 alone
    ("ddp", 2, 8, ["train.on_nonfinite=stop"], 3),
    ("fsdp", 3, 7, [CHECK, KEEPS, "train.accumulate=2"], 3),
    ("ddp", 3, 2, [KEEPS, NOISE, STEPS, "train.on_nonfinite=skip", "train.checkpoint.every={steps: 1}"], 0),
    ("fsdp", 3, 7, [CHECK, KEEPS, "task=evaluate"], 3),
    ("fsdp", 3, 7, [KEEPS, "task=predict", "task.backward={score: top}"], 0),
]


@pytest.mark.parametrize("strategy, ranks, rows, typed, code", CASES)
def test_what_one_rank_meets_alone_changes_no_collective(
    strategy: str, ranks: int, rows: int, typed: list[str], code: int, workers: Any, tmp_path: Path
) -> None:
    """The last row of the first batch, which the last rank with rows has, is not finite."""
    inputs = torch.ones(rows, 1, 8, 8)
    inputs[min(rows, 4) - 1] = torch.nan
    save_file(
        {"input": inputs, "target": torch.zeros(rows, dtype=torch.int64)}, tmp_path / "some.safetensors"
    )
    files = [f"data.args.{split}_file=some.safetensors" for split in ("train", "val")]
    settings = ["model=cnn", "model.args.num_classes=2", "data=tensors", *files, "data.batch_size=4"]
    more = ["train.shuffle=false", "train.epochs=1", "hydra.run.dir=run", "compute.timeout=20"]
    compute = [f"compute.strategy={strategy}", "compute.device=cpu", "compute.threads=1"]
    ended = workers.run(tmp_path, *settings, *more, *compute, *typed, ranks=ranks)
    assert ended.codes == [code] * ranks, ended.said
    first, *others = ended.collectives
    assert len(first) > 10
    assert others == [first] * (ranks - 1)
    assert hookrun.open_run(tmp_path / "run").status["status"] == ("stopped" if code else "done")
    assert (tmp_path / "run" / "report.html").exists()
