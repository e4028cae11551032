"""A run that is killed at any moment goes on to the end that it would have come to, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hookrun
from hookrun.store import checkpoint
from hookrun.store.captures import StoredCapture

# One process imports everything and forks a child for each run. A child is killed by SIGKILL at the n-th call of a
# function, and a second child goes on in its directory.
KILLED = """
import json, os, signal, sys

import torch

from hookrun.cli import main
from hookrun.store import files
from hookrun.tasks.loop import batches, training

torch.set_num_threads(1)  # a pool of threads does not survive a fork
PLACES = {"step": (training, "_step"), "line": (files.Lines, "append"), "fsync": (os, "fsync")}
PLACES |= {"rename": (os, "rename"), "replace": (os, "replace"), "batch": (batches.Batch, "__init__")}


def child(argv, kill=None):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
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
    os._exit(main(argv))


argv, kills, more = json.loads(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
assert main([*argv[:5], "task=evaluate", "hydra.run.dir=warm"]) == 0
codes = [child([*argv, "hydra.run.dir=whole"])]
for number, kill in enumerate(kills):
    codes.append(child([*argv, *more, f"hydra.run.dir=killed{number}"], kill))
    codes.append(child([f"resume=killed{number}"]))
print(json.dumps(codes))
"""
HOOKS = [
    "+hooks.kept={select: conv1, hook: forward, action: capture, keep: {reservoir: 30}}",
    "+hooks.all={select: fc, hook: forward, action: capture, when: {step: {every: 2}}}",
    "+hooks.noise={select: relu1, hook: forward, action: noise, std: 0.1, when: {probability: 0.5}}",
    "+hooks.seen={select: conv2, hook: forward, action: stats}",
    "+hooks.bias={select: fc, hook: forward, action: add_bias, value: 0.1, trainable: true}",
]
SMALL = [
    "compute.device=cpu",
    "compute.threads=1",
    "data.batch_size=50",
    "train.limit_batches=6",
    "train.log_every=2",
]
TRAIN = [
    *SMALL,
    *HOOKS,
    "train.epochs=2",
    "train.accumulate=2",
    "train.checkpoint.every.steps=1",
    "train.scheduler={name: CosineAnnealingLR, interval: step}",
    "train.ema={decay: 0.9}",
    "data.train_transforms={random_horizontal_flip: {p: 0.5}, random_crop: {size: 8, padding: 1}}",
]


def ends(folder: Path, argv: list[str], kills: list[tuple[str, int]], *more: str) -> None:
    """Every run that is killed and resumed comes to the end of the one that is not."""
    words = [json.dumps(each) for each in (argv, kills, more)]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *words], cwd=folder, capture_output=True, text=True, check=False
    )
    log = (folder / "log").read_text()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [0, *[-9, 0] * len(kills)], log
    whole = content(folder / "whole")
    for number, kill in enumerate(kills):
        assert_equal(content(folder / f"killed{number}"), whole, f"{kill}")
        assert not list((folder / f"killed{number}").rglob("state_*")), "states are left"
        assert not list((folder / f"killed{number}").rglob(".*.tmp")), "a torn file is left"


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_training(tmp_path: Path) -> None:
    """Killed before the first state, in the middle of an epoch, while a state or a line is written, near the end."""
    kills = [
        ("step", 1),
        ("step", 2),
        ("step", 5),
        ("fsync", 30),
        ("line", 12),
        ("rename", 2),
        ("replace", 6),
    ]
    ends(tmp_path, TRAIN, kills)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_training_with_workers_is_the_same_as_without(tmp_path: Path) -> None:
    ends(tmp_path, TRAIN, [("step", 4)], "data.workers=2")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("task", ["task=predict", "task=evaluate"])
def test_a_pass_without_training(tmp_path: Path, task: str) -> None:
    """Rows that fill a shard are there when the run is killed after it."""
    argv = [*SMALL, *HOOKS[:4], task, "compute.capture_buffer=1", "task.split=all"]
    ends(tmp_path, argv, [("batch", 2), ("batch", 11), ("fsync", 25)])
