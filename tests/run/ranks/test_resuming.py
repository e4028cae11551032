"""An interrupted run of several ranks is resumed: with as many ranks bit by bit, with others within rounding."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch

import hookrun
from hookrun.cli import main
from hookrun.store.reader import Run
from hookrun.store.verify import verify


def test_another_number_of_ranks_resumes_a_killed_one(workers, same, tmp_path, monkeypatch, capsys) -> None:
    """Killed in the middle of an epoch; resumed by two, by three and by one; what one did is resumed by two."""
    monkeypatch.chdir(tmp_path)
    assert workers.run(tmp_path, *ARGV, "hydra.run.dir=whole").codes == [0, 0]
    whole = hookrun.open_run(tmp_path / "whole")
    workers.start(tmp_path, *ARGV, "hydra.run.dir=two")
    wait_for(tmp_path / "two", 4)
    workers.kill(1)
    ended = workers.end(only=0)
    assert ended.codes == [1], ended.said
    assert "rank 1 is gone" in ended.said[0], ended.said
    assert "to go on: hookrun resume=two" in ended.said[0]
    for name in ("one", "three"):
        shutil.copytree("two", name)
    ended = workers.run(tmp_path, "resume=two")
    assert ended.codes == [0, 0], ended.said
    assert "resumed from state_0000" in ended.said[0]
    assert ended.said[1] == ""
    assert_same(same, whole, hookrun.open_run(tmp_path / "two"), exact=True)
    ended = workers.run(tmp_path, "resume=three", ranks=3)
    assert ended.codes == [0, 0, 0], ended.said
    assert_same(same, whole, hookrun.open_run(tmp_path / "three"), exact=False)
    assert main(["resume=one"]) == 0
    assert_same(same, whole, hookrun.open_run(tmp_path / "one"), exact=False)
    cut(tmp_path / "one", 11)  # the last of these states is of one process
    ended = workers.run(tmp_path, "resume=one")
    assert ended.codes == [0, 0], ended.said
    assert "resumed from state_0000" in ended.said[0]
    assert_same(same, whole, hookrun.open_run(tmp_path / "one"), exact=False)
    ended = workers.run(tmp_path, "resume=one")
    assert ended.codes == [0, 0]
    assert "is done: there is nothing to resume" in ended.said[0]
    assert ended.said[1] == ""


def test_sharded_parameters(workers, same, tmp_path, monkeypatch) -> None:
    """Under compute=fsdp a state holds whole tensors: it is resumed sharded as before, and in one process."""
    monkeypatch.chdir(tmp_path)
    argv = ["compute=fsdp" if each == "compute=ddp" else each for each in ARGV]
    ended = workers.run(tmp_path, *argv, "hydra.run.dir=whole")
    assert ended.codes == [0, 0], ended.said
    whole = hookrun.open_run(tmp_path / "whole")
    assert main(["resume=whole"]) == 0  # it is done, and is not changed
    for name, exact, others in (("divided", True, []), ("one", False, ["compute.strategy=none"])):
        shutil.copytree("whole", name)
        cut(tmp_path / name, 4)
        if name == "one":
            assert main([f"resume={name}", *others]) == 0
        else:
            ended = workers.run(tmp_path, f"resume={name}", *others)
            assert ended.codes == [0, 0], ended.said
        assert_same(same, whole, hookrun.open_run(tmp_path / name), exact=exact)


ARGV = (
    "model=cnn", "data=digits", "data.batch_size=9", "compute=ddp", "compute.device=cpu", "compute.threads=1",
    "compute.timeout=60", "train.epochs=2", "train.limit_batches=12", "train.accumulate=2", "train.log_every=1",
    "+train.optimizer={name: SGD, lr: 0.05, momentum: 0.9}", "train.ema={decay: 0.9}",
    "train.scheduler={name: StepLR, step_size: 3, gamma: 0.9}", "train.checkpoint.every.steps=1",
    "train.checkpoint.keep=100", "train.checkpoint.keep_done=true",
    "+hooks.rows={select: fc, hook: forward, action: capture, keep: {reservoir: 200}}",
    "+hooks.told={select: relu1, hook: forward, action: stats, when: {step: {every: 5}}}",
    "+hooks.noise={select: relu1, hook: forward, action: noise, std: 0.1, when: {probability: 0.7}}",
    "+hooks.units={select: fc, hook: forward, action: fold, of: [mean, cov, {quantiles: [0.5]}, {top: 3}]}",
    "+hooks.clip={select: fc, hook: grad, action: clamp, min: -0.01, max: 0.01}",
)  # fmt: skip


def assert_same(same: Any, one: Run, other: Run, *, exact: bool) -> None:
    assert other.status["status"] == "done"
    for name in ("last", "ema"):
        same.weights(one, other, name, atol=0.0 if exact else 1e-5)
    if exact:
        assert one.metrics == other.metrics
        assert one.stats == other.stats
        assert one.hooks == other.hooks
        assert torch.equal(same.rows_of(one, "rows", "fc")[:], same.rows_of(other, "rows", "fc")[:])
    same.metrics(one, other, rtol=1e-3)
    same.rows(one, other, rtol=1e-3)
    same.folds(one, other, exact=exact)
    assert verify(other.path).bad == []
    assert counts_of(one) == counts_of(other)


def cut(run: Path, first: int) -> None:
    """As if the run had failed after its first states."""
    for state in sorted(run.glob("checkpoints/state_*"))[first:]:
        shutil.rmtree(state)
    (run / "status.json").write_text(json.dumps({"status": "failed"}))


def wait_for(folder: Path, count: int) -> None:
    end = time.monotonic() + 120
    while len(list(folder.glob("checkpoints/state_*"))) < count:
        assert time.monotonic() < end, f"{folder} has no {count} states"
        time.sleep(0.05)


def counts_of(run: Any) -> set[tuple[str, int, int]]:
    """Hook, how often it fired, and in how many calls it could, of each of its modules."""
    return {(site["hook"], site["fired"], site["total"]) for site in run.hooks["sites"]}
