"""A run that is killed at any moment and resumed has the results of an uninterrupted one, bit for bit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from warm_processes import WarmProcesses

import hookrun
from hookrun.store.captures.read import StoredCapture
from hookrun.store.states import checkpoint

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
# One process forks a child for each run. A child is killed by SIGKILL at the n-th call of a
# function, and a second child resumes the run.
KILLED = """
import json, os, signal, sys

from warm_children import first_child

from hookrun.cli import main
from hookrun.store import files
from hookrun.sweeps import jobs
from hookrun.tasks.resume import states as resuming
from hookrun.tasks.run import batches
from hookrun.tasks.training import loop as training

jobs.make_page = lambda folder: None  # which nobody reads here
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
PASS = [*SMALL, *HOOKS[:4], "compute.capture_buffer=1", "task.split=all"]
TRAINING = {"step": (1, 2, 5), "fsync": (30,), "line": (12,), "rename": (2,), "replace": (6,)}
WHILE_IT_TRAINS: list[Kill] = [(name, call, []) for name, calls in TRAINING.items() for call in calls]
WITH_WORKERS: Kill = ("step", 4, ["data.workers=2"])
# A slow disk joins the flushes of several shards: 12 is less than what any run has.
IN_A_PASS: list[Kill] = [("batch", 2, []), ("batch", 11, []), ("fsync", 12, [])]
RUNS = {
    "train": (TRAIN, [*WHILE_IT_TRAINS, WITH_WORKERS]),
    "predict": ([*PASS, "task=predict"], IN_A_PASS),
    "evaluate": ([*PASS, "task=evaluate"], IN_A_PASS),
}


class Ended(NamedTuple):
    """Where each of `RUNS` was killed and resumed, with the exit codes: whole, killed, resumed, killed, resumed, …"""

    folder: Path
    codes: dict[str, list[int]]

    def is_as_whole(self, name: str, number: int) -> None:
        """Check that the run that was killed and resumed equals the uninterrupted one."""
        where = self.folder / name
        codes = [self.codes[name][at] for at in (0, 2 * number + 1, 2 * number + 2)]
        assert codes == [0, -9, 0], (where / "log").read_text()
        killed, kill = where / f"killed{number}", RUNS[name][1][number]
        assert_equal(content(killed), content(where / "whole"), f"{kill}")
        assert not list(killed.rglob("state_*")), "states are left"
        assert not list(killed.rglob(".*.tmp")), "a torn file is left"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, warm: WarmProcesses) -> Ended:
    folder = tmp_path_factory.mktemp("killed")
    done = warm.run(KILLED, json.dumps(RUNS), cwd=folder)
    assert done.returncode == 0, done.stderr
    return Ended(folder, json.loads(done.stdout.splitlines()[-1]))


def content(folder: Path) -> dict[str, Any]:
    run = hookrun.open_run(folder)
    found: dict[str, Any] = {"status": run.status["status"], "metrics": list(map(str, run.metrics))}
    found["captures"] = rows(run.captures)
    for name in ("stats.jsonl", "samples.jsonl", "hooks.json"):
        found[name] = (folder / name).read_text() if (folder / name).exists() else None
    for file in sorted((folder / "checkpoints").glob("*")):
        found[file.name] = checkpoint.read(file)
    if (folder / "predictions").exists():
        found["predictions"] = rows(run.predictions)
    return found


def rows(found: Any) -> Any:
    if not isinstance(found, StoredCapture):
        return {key: rows(found[key]) for key in found}
    columns = ("sample_ids", "epochs", "steps", "calls", "splits")
    return {"rows": found[:], **{name: getattr(found, name) for name in columns}}


def assert_equal(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_equal(found[key], value, f"{where} {key}")
    else:
        assert found == expected, where


def test_training(ended: Ended) -> None:
    """Killed before the first state, in the middle of an epoch, while a state or a line is written, near the end."""
    for number in range(len(WHILE_IT_TRAINS)):
        ended.is_as_whole("train", number)


def test_training_with_workers_is_the_same_as_without(ended: Ended) -> None:
    ended.is_as_whole("train", RUNS["train"][1].index(WITH_WORKERS))


@pytest.mark.parametrize("task", ["predict", "evaluate"])
def test_a_pass_without_training(ended: Ended, task: str) -> None:
    """Rows that fill a shard are there when the run is killed after it."""
    for number in range(len(IN_A_PASS)):
        ended.is_as_whole(task, number)
