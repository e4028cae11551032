"""`task=predict`, killed with SIGKILL at random moments and resumed: indexed shards stay, and the results are equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from warm_processes import WarmProcesses

from hookrun.store.reader import open_run
from hookrun.store.verify import verify

KILLS = 2

# One process makes a whole run and then forks a child for each run and resumption.
PROGRAM = """
import contextlib, os, random, shutil, signal, sys, time

from hookrun.cli import main

CAPTURE, NOISE = "{select: relu2, hook: forward, action: capture}", "{select: conv1, hook: forward, action: noise}"
HOOKS = [f"+hooks.h={CAPTURE}", f"+hooks.n={NOISE}"]
ARGV = ["compute.device=cpu", "compute.threads=1", "compute.capture_buffer=1", "data.batch_size=8",
        "train.limit_batches=80", "task=predict", "task.split=train", *HOOKS]


def run(argv):
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        return main(argv)


def child(argv):
    pid = os.fork()
    if pid == 0:
        os._exit(run(argv))
    return pid


assert run([*ARGV, "hydra.run.dir=whole"]) == 0
start = time.perf_counter()
assert os.waitpid(child([*ARGV, "hydra.run.dir=again"]), 0)[1] == 0
duration = time.perf_counter() - start
draw = random.Random(0)
for number in range(int(sys.argv[1])):
    pid = child([*ARGV, f"hydra.run.dir={number}"])
    time.sleep(duration * (0.5 + draw.uniform(0, 0.5)))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if os.path.exists(f"{number}/status.json"):
        shutil.copytree(str(number), f"{number}.killed")
        assert os.waitpid(child([f"resume={number}"]), 0)[1] == 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, warm: WarmProcesses) -> Path:
    path = tmp_path_factory.mktemp("runs")
    done = warm.run(PROGRAM, KILLS, cwd=path)
    assert done.returncode == 0, done.stderr
    return path


def shards(path: Path) -> list[dict[str, Any]]:
    index = path / "captures" / "index.jsonl"
    return [json.loads(line) for line in index.read_text().splitlines()] if index.exists() else []


def test_resumed_runs_have_the_results_of_an_uninterrupted_one(folder: Path) -> None:
    whole = open_run(folder / "whole")
    resumed = [path for path in folder.iterdir() if path.name.isdigit() and (path / "status.json").exists()]
    assert resumed
    for path in resumed:
        run = open_run(path)
        assert run.status["status"] == "done" and verify(path).bad == []
        assert run.metrics == whole.metrics
        assert (path / "samples.jsonl").read_text() == (folder / "whole" / "samples.jsonl").read_text()
        for found, there in (
            (run.captures["h"]["relu2"], whole.captures["h"]["relu2"]),
            (run.predictions, whole.predictions),
        ):
            assert torch.equal(found[:], there[:]) and torch.equal(found.sample_ids, there.sample_ids)
        before, after = shards(folder / f"{path.name}.killed"), shards(path)
        kept = [shard for shard in before if shard in after]
        assert len(kept) >= len(before) - 4, (
            "only those of batches that the writer had at once are written again"
        )
