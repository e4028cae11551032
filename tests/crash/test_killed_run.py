"""`task=predict`, killed with SIGKILL at random moments: what its indexes name is complete, and it can be resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from warm_processes import WarmProcesses

from hookrun.store.files import StoreError
from hookrun.store.reader import Run, open_run
from hookrun.store.verify import verify

KILLS, RESUMED = 12, 2

# One process forks a child for each run and resumption; it draws the moments from the time that a whole run needs.
PROGRAM = """
import contextlib, os, random, shutil, signal, sys, time

from hookrun.cli import main

CAPTURE, NOISE = "{select: relu2, hook: forward, action: capture}", "{select: conv1, hook: forward, action: noise}"
ARGV = ["compute.device=cpu", "compute.threads=1", "compute.capture_buffer=1", "data.batch_size=16", "task=predict",
        "task.split=train", f"+hooks.h={CAPTURE}", f"+hooks.n={NOISE}"]


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
kills, resumed = map(int, sys.argv[1:])
for number in range(kills):
    pid = child([*ARGV, f"hydra.run.dir={number}"])
    time.sleep(duration * draw.uniform(0.5 if number < resumed else 0, 1))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if number < resumed and os.path.exists(f"{number}/status.json"):
        shutil.copytree(str(number), f"{number}.resumed")
        assert os.waitpid(child([f"resume={number}.resumed"]), 0)[1] == 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, warm: WarmProcesses) -> Path:
    path = tmp_path_factory.mktemp("runs")
    done = warm.run(PROGRAM, KILLS, RESUMED, cwd=path)
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


def shards(path: Path) -> list[dict[str, Any]]:
    index = path / "captures" / "index.jsonl"
    return [json.loads(line) for line in index.read_text().splitlines()] if index.exists() else []


def test_resumed_runs_have_the_results_of_an_uninterrupted_one(folder: Path) -> None:
    whole = open_run(folder / "whole")
    resumed = list(folder.glob("*.resumed"))
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
        before, after = shards(path.with_suffix("")), shards(path)
        kept = [shard for shard in before if shard in after]
        assert len(kept) >= len(before) - 4, "only the shards that the writer had at once are written again"
