"""Runs and sweeps that are killed with SIGKILL at any moment can be read, and resumed as if never interrupted."""

from __future__ import annotations

import csv
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from run_files import recorded
from warm_processes import WarmProcesses

import hookrun
from hookrun.cli import main
from hookrun.store.reader import Run
from hookrun.store.verify import verify

JOB = [
    "model=mlp", "+hooks.features={select: layers.0, hook: forward, action: capture}", "train.limit_batches=2",
    "train.epochs=2", "compute.device=cpu", "compute.threads=1",
]  # fmt: skip
SWEEP = ["-m", *JOB, "seed=1,2,3"]


COMMAND_LINE = "import sys; from hookrun.cli import main; sys.exit(main(sys.argv[1:]))"


def test_two_resume_a_killed_job_at_once(tmp_path, monkeypatch, warm) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*JOB, "seed=2", "hydra.run.dir=whole"]) == 0
    killed = warm.start(COMMAND_LINE, *SWEEP, "hydra.sweep.dir=cut")
    while not Path("cut/1/metrics.jsonl").exists() and killed.poll() is None:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not Path("cut/2").exists()
    done = Path("cut/0/status.json").read_bytes()
    with tempfile.TemporaryFile("w+") as one, tempfile.TemporaryFile("w+") as other:
        twice = [warm.start(COMMAND_LINE, "-m", "resume=cut", stderr=file) for file in (one, other)]
        codes = [each.wait() for each in twice]
        one.seek(0), other.seek(0)
        said = [one.read(), other.read()]
    assert sorted(codes) in ([0, 2], [0, 0]), said  # the second may start when the first is over
    refused = [text for text, code in zip(said, codes, strict=True) if code]
    assert all("is being written by" in text for text in refused), refused
    assert Path("cut/0/status.json").read_bytes() == done
    with Path("cut/sweep.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    theirs = hookrun.open_run(tmp_path / "whole")
    loss = str(theirs.metrics[-1]["loss"])
    assert [(row["seed"], row["status"], row["val/loss"] == loss) for row in rows] == [
        ("1", "done", False), ("2", "done", True), ("3", "done", False),
    ]  # fmt: skip
    ours = hookrun.open_run(tmp_path / "cut/1")
    assert ours.metrics == theirs.metrics
    found = ours.captures["features"]["layers.0"]
    wanted = theirs.captures["features"]["layers.0"]
    assert torch.equal(found[:], wanted[:])
    assert torch.equal(found.sample_ids, wanted.sample_ids)
    assert set(os.listdir(ours.path)) == {*os.listdir(theirs.path), "job.json"}


pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
# One process forks a child for each run. A child is killed by SIGKILL at the n-th call of a
# function, and a second child resumes the run.
KILLED = """
import json, os, shutil, signal, sys

from warm_children import first_child

from hookrun.cli import main
from hookrun.store import files
from hookrun.command.sweeps import jobs
from hookrun.run.passes import resuming
from hookrun.run.passes import batches
from hookrun.run.training import loop as training

jobs.make_page = lambda folder, says=True: None  # which nobody reads here
PLACES = {"step": (training, "train_step"), "line": (files.Lines, "extend"), "fsync": (os, "fsync")}
PLACES |= {"rename": (os, "rename"), "replace": (os, "replace"), "batch": (batches.Batch, "__init__")}


def run(argv, kill=None):
    log = os.open("log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    if kill:
        (owner, name), left = PLACES[kill[0]], [kill[1]]
        function = getattr(owner, name)

        def counted(*args, **options):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        setattr(owner, name, counted)
    return main(argv)


def child(*args):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os._exit(run(*args))


codes = {}
for name, (argv, kills) in json.loads(sys.argv[1]).items():
    os.mkdir(name)
    os.chdir(name)
    codes[name] = [first_child(lambda: run([*argv, "hydra.run.dir=whole"]))]
    for number, (*kill, more) in enumerate(kills):
        codes[name].append(child([*argv, *more, f"hydra.run.dir=killed{number}"], kill))
        shutil.copytree(f"killed{number}", f"cut{number}")
        codes[name].append(child([f"resume=killed{number}"]))
    os.chdir("..")
print(json.dumps(codes))
"""
Kill = tuple[str, int, list[str]]
"""The function, the call at which it is killed, and what else is typed for that run."""
HOOKS = [
    "+hooks.kept={select: conv1, hook: forward, action: capture, keep: {reservoir: 30}}",
    "+hooks.all={select: fc, hook: forward, action: capture, when: {step: {every: 2}}}",
    "+hooks.noise={select: relu1, hook: forward, action: noise, std: 0.1, when: {probability: 0.5}}",
    "+hooks.seen={select: conv2, hook: forward, action: stats}",
    "+hooks.bias={select: fc, hook: forward, action: add_bias, value: 0.1, trainable: true}",
]
SMALL = [
    "compute.device=cpu", "compute.threads=1", "data.batch_size=50", "train.limit_batches=6", "train.log_every=2",
]  # fmt: skip
TRAIN = [
    *SMALL, *HOOKS, "train.epochs=2", "train.accumulate=2", "train.checkpoint.every.steps=1", "train.ema={decay: 0.9}",
    "train.scheduler={name: CosineAnnealingLR, interval: step}",
    "data.train_transforms={random_horizontal_flip: {p: 0.5}, random_crop: {size: 8, padding: 1}}",
]  # fmt: skip
PASS = [*SMALL, *HOOKS[:4], "compute.capture_buffer=1", "task=predict", "task.split=all"]
TRAINING = {"step": 1, "fsync": 30, "line": 12, "rename": 2, "replace": 6}
WHILE_IT_TRAINS: list[Kill] = [(name, call, []) for name, call in TRAINING.items()]
WITH_WORKERS: Kill = ("step", 4, ["data.workers=2"])
# A slow disk joins the flushes of several shards: 12 is less than what any run has.
IN_A_PASS: list[Kill] = [("batch", 11, []), ("fsync", 12, [])]
RUNS = {"train": (TRAIN, [*WHILE_IT_TRAINS, WITH_WORKERS]), "predict": (PASS, IN_A_PASS)}


class Ended(NamedTuple):
    """Where each of `RUNS` was killed and resumed, with the exit codes: whole, killed, resumed, killed, resumed, …"""

    folder: Path
    codes: dict[str, list[int]]

    def is_as_whole(self, name: str, number: int) -> None:
        """Check that the run that was killed and resumed equals the uninterrupted one."""
        where = self.folder / name
        codes = [self.codes[name][at] for at in (0, 2 * number + 1, 2 * number + 2)]
        assert codes == [0, -9, 0], (where / "log").read_text()
        killed = where / f"killed{number}"
        kill = RUNS[name][1][number]
        found = recorded(hookrun.open_run(killed))
        whole = recorded(hookrun.open_run(where / "whole"))
        for key, expected in whole.items():
            assert found[key] == expected, (kill, key)
        assert not list(killed.rglob("state_*")), "states are left"
        assert not list(killed.rglob(".*.tmp")), "a torn file is left"


def shards(path: Path) -> list[dict[str, Any]]:
    index = path / "captures" / "index.jsonl"
    return [json.loads(line) for line in index.read_text().splitlines()] if index.exists() else []


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, warm: WarmProcesses) -> Ended:
    folder = tmp_path_factory.mktemp("killed")
    done = warm.run(KILLED, json.dumps(RUNS), cwd=folder)
    assert done.returncode == 0, done.stderr
    return Ended(folder, json.loads(done.stdout.splitlines()[-1]))


def test_training(ended: Ended) -> None:
    """Killed before the first state, and while a state or a line is written."""
    for number in range(len(WHILE_IT_TRAINS)):
        ended.is_as_whole("train", number)


def test_training_with_workers_is_the_same_as_without(ended: Ended) -> None:
    """Killed in the middle of an epoch."""
    ended.is_as_whole("train", RUNS["train"][1].index(WITH_WORKERS))


def test_a_pass_without_training(ended: Ended) -> None:
    """Rows that fill a shard are there when the run is killed after it."""
    for number in range(len(IN_A_PASS)):
        ended.is_as_whole("predict", number)


def by_sample(run: Run) -> dict[tuple[Any, ...], torch.Tensor]:
    """(split, epoch, step, sample) -> the row of the hook `all`."""
    rows = run.captures["all"]["fc"]
    columns = (rows.splits, rows.epochs.tolist(), rows.steps.tolist(), rows.sample_ids.tolist())
    return dict(zip(zip(*columns, strict=True), rows[:], strict=True))


def test_all_that_a_killed_run_indexed_is_right(ended: Ended) -> None:
    counts = set()
    for task, (_, kills) in RUNS.items():
        whole = by_sample(hookrun.open_run(ended.folder / task / "whole"))
        for number, kill in enumerate(kills):
            path = ended.folder / task / f"cut{number}"
            run = hookrun.open_run(path)
            checked = verify(path)
            assert checked.bad == [], (task, kill)
            assert run.cut_off, (task, kill)
            counts.add(checked.shards)
            if "all" in run.captures:
                for place, row in by_sample(run).items():
                    assert torch.equal(row, whole[place]), (task, kill, place)
            after = shards(path.with_name(f"killed{number}"))
            kept = [shard for shard in shards(path) if shard in after]
            assert len(kept) >= checked.shards - 4, "only what the writer had at once is written again"
    assert len(counts) > 3, "killed early, late and in between"
