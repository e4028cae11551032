"""A run of the command line, killed with SIGKILL at twelve random moments: everything in its indexes is complete."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from warm_processes import WarmProcesses

from hookrun.store.files import StoreError
from hookrun.store.reader import Run, open_run
from hookrun.store.verify import verify

KILLS = 12

# One process forks a child for each run; it draws the moments from the time that a child needs for a whole run.
PROGRAM = """
import contextlib, os, random, signal, sys, time

from hookrun.cli import main

HOOK = "+hooks.h={select: relu2, hook: forward, action: capture}"
ARGV = ["compute.device=cpu", "compute.threads=1", "compute.capture_buffer=1", "task=predict", "task.split=train", HOOK]


def run(name):
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        return main([*ARGV, f"hydra.run.dir={name}"])


def started(name):
    child = os.fork()
    if child == 0:
        os._exit(run(name))
    return child


assert run("whole") == 0
start = time.perf_counter()
assert os.waitpid(started("again"), 0)[1] == 0
duration = time.perf_counter() - start
draw = random.Random(0)
for number in range(int(sys.argv[1])):
    child = started(str(number))
    time.sleep(draw.uniform(0, duration))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, warm: WarmProcesses) -> Path:
    path = tmp_path_factory.mktemp("runs")
    done = warm.run(PROGRAM, KILLS, cwd=path)
    assert done.returncode == 0, done.stderr
    return path


def opened(folder: Path) -> list[Run]:
    """The runs that had begun when they were killed."""
    found = []
    for number in range(KILLS):
        try:
            found.append(open_run(folder / str(number)))
        except StoreError:
            assert not (folder / str(number) / "status.json").exists()
    return found


def test_every_indexed_shard_is_complete_and_equals_that_of_an_uninterrupted_run(folder: Path) -> None:
    whole = open_run(folder / "whole").captures["h"]["relu2"]
    counts = set()
    for run in opened(folder):
        checked = verify(run.path)
        assert checked.bad == [], run.path
        counts.add(checked.shards)
        if checked.shards and "h" in run.captures:
            rows = run.captures["h"]["relu2"]
            assert torch.equal(rows[:], whole[rows.sample_ids]), run.path
    assert len(whole) == 1438 and len(counts) > 3, "killed early, late and in between"


def test_a_killed_run_is_read_as_done_or_cut_off(folder: Path) -> None:
    runs = opened(folder)
    assert len(runs) > KILLS / 4
    ends = {str(run.status["status"]) for run in runs if run.cut_off == ""}
    assert ends <= {"done"}
    assert any(run.cut_off for run in runs)
