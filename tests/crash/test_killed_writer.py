"""A run killed with SIGKILL at any system call is readable up to the last complete shard and line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from warm_processes import WarmProcesses

from hookrun.store.captures.shard import read_index
from hookrun.store.reader import Run, open_run
from hookrun.store.states.checkpoint import read

STEPS = 3
CALLS = ("fsync", "replace", "write")

# One process forks one child for each moment: the child writes a run and kills itself at the
# n-th call of one of the calls that everything on disk goes through. A write is killed half way.
PROGRAM = """
import json, os, signal, sys
from pathlib import Path

import torch
from torch import nn

from hookrun.store.states.checkpoint import save
from hookrun.store.run_dir import RunDir
from hookrun.store.captures.write import CaptureWriter

root, steps = Path(sys.argv[1]), int(sys.argv[2])

def die_at(moment):
    count = 0

    def wrap(name):
        real = getattr(os, name)

        def call(*args):
            nonlocal count
            if count == moment:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                (root / f"{moment}.killed").write_text(name)
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return real(*args)

        setattr(os, name, call)

    for name in ("fsync", "replace", "write"):
        wrap(name)


def write_a_run(path):
    run = RunDir.create(path, buffer=12_000)  # shards of 4,000 bytes
    run.set_status("running")
    model = nn.Linear(2, 2)
    for step in range(steps):
        run.captures.add("f", "m", torch.full((4, 100), float(step)), sample_ids=range(4), epoch=0, step=step, call=0)
        run.captures.flush()
        run.log_metrics(step=step)
        nn.init.constant_(model.weight, step)
        save(model, run.checkpoints / "last.safetensors")
    run.close()
    run.set_status("done")


moment, killed = 0, True
while killed:
    child = os.fork()
    if child == 0:
        die_at(moment)
        write_a_run(root / str(moment))
        os._exit(0)
    killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    moment += 1
print(moment - 1)
"""


@dataclass(frozen=True)
class Killed:
    moment: int
    call: str
    path: Path

    def opened(self) -> Run | None:
        """The run, or None where it was killed before it had a status."""
        return open_run(self.path) if (self.path / "status.json").exists() else None


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, warm: WarmProcesses) -> list[Killed]:
    root = tmp_path_factory.mktemp("killed")
    done = warm.run(PROGRAM, root, STEPS)
    assert done.returncode == 0, done.stderr
    moments = range(int(done.stdout))
    assert open_run(root / str(len(moments))).status["status"] == "done"  # the last child was not killed
    return [Killed(moment, (root / f"{moment}.killed").read_text(), root / str(moment)) for moment in moments]


def runs(killed: list[Killed]) -> Iterator[tuple[Killed, Run]]:
    return ((each, run) for each in killed if (run := each.opened()) is not None)


def test_a_child_was_killed_at_every_kind_of_disk_call(killed: list[Killed]) -> None:
    assert len(killed) > 10 * STEPS
    assert {each.call for each in killed} == set(CALLS)


def test_every_file_in_the_index_is_complete_and_matches_its_hash(killed: list[Killed]) -> None:
    seen = set()
    for each, run in runs(killed):
        shards, _ = read_index(run.path / "captures")
        for shard in shards:
            data = (run.path / "captures" / shard.file).read_bytes()
            assert (hashlib.sha256(data).hexdigest(), len(data)) == (shard.sha256, shard.bytes), each
        rows = run.captures["f"]["m"][:] if shards else torch.empty(0, 100)
        steps = torch.arange(len(shards), dtype=torch.float32)
        assert torch.equal(rows, steps.repeat_interleave(4)[:, None].expand(-1, 100)), each
        seen.add(len(shards))
    assert seen == set(range(STEPS + 1))


def test_a_shard_without_its_line_in_the_index_does_not_count(killed: list[Killed]) -> None:
    orphans = 0
    for each, run in runs(killed):
        indexed = {shard.file for shard in read_index(run.path / "captures")[0]}
        on_disk = {path.name for path in (run.path / "captures").glob("[!.]*.safetensors")}
        assert indexed <= on_disk, each
        orphans += len(on_disk - indexed)
    assert orphans > 0  # the moment between renaming and indexing was among them


def test_metrics_are_read_up_to_the_last_complete_line(killed: list[Killed]) -> None:
    torn = 0
    for each, run in runs(killed):
        assert run.metrics == [{"step": step} for step in range(len(run.metrics))], each
        torn += any("metrics.jsonl: the last line is cut off" in note for note in run.notes)
    assert torn == STEPS


def test_the_last_checkpoint_is_complete(killed: list[Killed]) -> None:
    seen = set()
    for each, run in runs(killed):
        path = run.path / "checkpoints" / "last.safetensors"
        if path.exists():
            weight = read(path)["weight"]
            assert weight.eq(weight[0, 0]).all(), each
            seen.add(weight[0, 0].item())
    assert seen == {0, 1, 2}


def test_a_note_says_that_a_killed_run_was_cut_off(killed: list[Killed]) -> None:
    for each, run in runs(killed):
        assert (
            run.status["status"] == "running" or json.loads((run.path / "status.json").read_text())["ended"]
        ), each
        if run.status["status"] == "running":
            assert run.notes[0].endswith("it was cut off"), each
