"""A run of several ranks that was cut off goes on: with as many ranks bit by bit, with others within rounding."""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hookrun
from hookrun.cli import main
from hookrun.store.captures import StoredCapture
from hookrun.store.reader import Run
from hookrun.store.verify import verify

ARGV = (
    "model=cnn",
    "data=digits",
    "data.batch_size=9",
    "compute=ddp",
    "compute.device=cpu",
    "compute.threads=1",
    "compute.timeout=60",
    "train.epochs=2",
    "train.limit_batches=24",
    "train.accumulate=2",
    "train.log_every=1",
    "train.optimizer={name: Adam, lr: 0.01}",
    "train.scheduler={name: StepLR, step_size: 3, gamma: 0.9}",
    "train.ema={decay: 0.9}",
    "train.checkpoint.every.steps=1",
    "train.checkpoint.keep=100",
    "+hooks.rows={select: fc, hook: forward, action: capture, keep: {reservoir: 200}}",
    "+hooks.told={select: relu1, hook: forward, action: stats, when: {step: {every: 5}}}",
    "+hooks.noise={select: relu1, hook: forward, action: noise, std: 0.1, when: {probability: 0.7}}",
    "+hooks.clip={select: fc, hook: grad, action: clamp, min: -0.01, max: 0.01}",
)


def weights(run: Run, name: str = "last") -> dict[str, torch.Tensor]:
    return load_file(run.path / "checkpoints" / f"{name}.safetensors")


def of_module(run: Run) -> StoredCapture:
    rows = run.captures["rows"]["fc"]
    assert isinstance(rows, StoredCapture)
    return rows


def assert_same(one: Run, other: Run, *, exact: bool) -> None:
    assert other.status["status"] == "done"
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-3, "atol": 1e-5}
    for name in ("last", "ema"):
        for key, each in weights(one, name).items():
            assert torch.allclose(each, weights(other, name)[key], **tolerance), (name, key)
    assert len(one.metrics) == len(other.metrics)
    for line, its in zip(one.metrics, other.metrics, strict=True):
        assert line.keys() == its.keys()
        for key, value in line.items():
            close = value == its[key] or math.isclose(value, its[key], rel_tol=1e-3)
            assert value == its[key] if exact else close, (key, line, its)
    rows, others = of_module(one), of_module(other)
    for column in ("sample_ids", "epochs", "steps", "splits"):
        assert torch.equal(getattr(rows, column), getattr(others, column)), column
    assert torch.allclose(rows[:], others[:], **tolerance)
    assert verify(other.path).bad == []
    if exact:
        assert one.stats == other.stats and one.hooks == other.hooks
    assert {(site["hook"], site["fired"], site["total"]) for site in one.hooks["sites"]} == {
        (site["hook"], site["fired"], site["total"]) for site in other.hooks["sites"]
    }


def wait_for(folder: Path, count: int) -> None:
    end = time.monotonic() + 120
    while len(list(folder.glob("checkpoints/state_*"))) < count:
        assert time.monotonic() < end, f"{folder} has no {count} states"
        time.sleep(0.05)


def test_a_killed_rank_and_another_number_of_ranks(
    workers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Killed in the middle of an epoch; what it left goes on in two processes, in one, and in three."""
    monkeypatch.chdir(tmp_path)
    assert workers.run(tmp_path, *ARGV, "hydra.run.dir=whole").codes == [0, 0]
    whole = hookrun.open_run(tmp_path / "whole")
    workers.start(tmp_path, *ARGV, "hydra.run.dir=two")
    wait_for(tmp_path / "two", 5)
    workers.kill(1)
    ended = workers.end(only=0)
    assert ended.codes == [1] and "rank 1 is gone" in ended.said[0], ended.said
    assert "to go on: hookrun resume=two" in ended.said[0]
    for name in ("one", "three"):
        shutil.copytree("two", name)
    ended = workers.run(tmp_path, "resume=two")
    assert ended.codes == [0, 0], ended.said
    assert "goes on from state_0000" in ended.said[0] and ended.said[1] == ""
    assert_same(whole, hookrun.open_run(tmp_path / "two"), exact=True)
    ended = workers.run(tmp_path, "resume=three", ranks=3)
    assert ended.codes == [0, 0, 0], ended.said
    assert_same(whole, hookrun.open_run(tmp_path / "three"), exact=False)
    assert main(["resume=one"]) == 0
    assert_same(whole, hookrun.open_run(tmp_path / "one"), exact=False)
    ended = workers.run(tmp_path, "resume=one")
    assert ended.codes == [0, 0] and "is done: there is nothing to resume" in ended.said[0]
    assert ended.said[1] == ""
