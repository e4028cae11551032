"""A run directory has one writer, and what it wrote when it was killed is complete up to the last shard and line."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from warm_processes import WarmProcesses

from hookrun.cli import main
from hookrun.store.captures.shard import read_index
from hookrun.store.files import StoreError
from hookrun.store.lock import LockedError, sole_writer
from hookrun.store.reader import Run, open_run

KINDS: dict[str, tuple[int, list[str]]] = {"run": (8, []), "sweep": (3, ["-m"])}
"""How many start at once, and what is typed."""

HOLDER = """
import sys, time
from pathlib import Path
from hookrun.store.lock import sole_writer
with sole_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def raced(tmp_path_factory: pytest.TempPathFactory, warm: WarmProcesses) -> tuple[Path, dict[str, list[int]]]:
    """The directories of the starts of each kind, and their exit codes."""
    folder = tmp_path_factory.mktemp("raced")
    done = warm.run(RACE, json.dumps(KINDS), "with locks", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_only_one_of_many_starts_writes(kind: str, raced) -> None:
    assert_one_wrote(kind, raced[0], raced[1][kind], KINDS[kind][0])


def test_only_one_start_writes_without_file_locks(tmp_path: Path, warm) -> None:
    done = warm.run(RACE, json.dumps({"run": (3, [])}), "without locks", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_one_wrote("run", tmp_path, json.loads(done.stdout.splitlines()[-1])["run"], 3)
    assert not (tmp_path / "run/.lease").exists()


def assert_one_wrote(kind: str, folder: Path, codes: list[int], starts: int) -> None:
    """One start has ended with 0 and its configuration is there; the others were refused."""
    assert sorted(codes) == [0] + [2] * (starts - 1)
    winner = codes.index(0)
    run_dir = folder / kind / ("0" if kind == "sweep" else "")
    kept = yaml.safe_load((run_dir / ".hydra/config.yaml").read_text())
    assert kept["seed"] == winner, "the winner's directory holds the winner's configuration"
    assert open_run(run_dir).status["status"] == "done"
    for seed in set(range(starts)) - {winner}:
        said = (folder / f"{kind}-{seed}.log").read_text()
        assert f"hydra.{kind}.dir" in said
        assert "Traceback" not in said
        assert "is being written by process" in said or "already holds" in said, said
    assert not (folder / kind / ".lock").exists()


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    """A process that holds the lock of ``tmp_path / "held"``."""
    command = program(HOLDER, tmp_path / "held")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_locked_directory_is_left_alone(holder, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    small = ["model=mlp", "train.limit_batches=1", "train.epochs=1", "compute.device=cpu"]
    for where in ("held", "held/inside"):
        assert main([*small, f"hydra.run.dir={where}"]) == 2
        said = capsys.readouterr().err
        assert f"{tmp_path / 'held'} is being written by process {holder.pid}" in said
        assert "hydra.run.dir" in said
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "held/inside").exists()


def test_the_lock_is_released_when_its_process_dies(holder: Any, tmp_path: Path) -> None:
    with pytest.raises(LockedError), sole_writer(tmp_path / "held"):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "held/.lock").exists(), "a file that is left over means nothing"
    with sole_writer(tmp_path / "held"):
        pass
    assert not (tmp_path / "held/.lock").exists()


def test_a_surviving_worker_does_not_hold_the_lock(tmp_path: Path) -> None:
    with sole_writer(tmp_path / "run"):
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    try:
        with sole_writer(tmp_path / "run"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_forked_worker_does_not_release_the_lock(tmp_path: Path) -> None:
    with sole_writer(tmp_path / "run"):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(LockedError), sole_writer(tmp_path / "run"):
            pass


def test_a_directory_is_left_as_it_was_found(tmp_path: Path) -> None:
    with sole_writer(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists(), "nothing was written into it"
    with sole_writer(tmp_path / "kept"):
        (tmp_path / "kept/file").touch()
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["file"]
    (tmp_path / "there").mkdir()
    with sole_writer(tmp_path / "there"):
        pass
    assert (tmp_path / "there").is_dir()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "run/.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(StoreError, match=r"cannot lock .*\.lock"), sole_writer(tmp_path / "run"):
        pass
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_directory_removed_meanwhile_is_no_error_of_the_lock(tmp_path: Path) -> None:
    with sole_writer(tmp_path / "run"):
        (tmp_path / "run/.lock").unlink()
        (tmp_path / "run").rmdir()
    assert not (tmp_path / "run").exists()


STEPS = 3
CALLS = ("fsync", "replace", "write")

# One process forks one child for each moment: the child writes a run and kills itself at the
# n-th call of one of the calls that everything on disk goes through. A write is killed half way.
PROGRAM = """
import json, os, signal, sys
from pathlib import Path

import torch
from torch import nn

from hookrun.store.states.files import save_weights
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
        save_weights(model, run.checkpoints / "last.safetensors")
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


def test_every_indexed_file_matches_its_hash(killed: list[Killed]) -> None:
    seen = set()
    for each, run in runs(killed):
        shards = read_index(run.path / "captures")
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
        indexed = {shard.file for shard in read_index(run.path / "captures")}
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
            weight = load_file(path)["weight"]
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


# One process forks a child for each start; they wait for the same moment.
RACE = """
import errno, fcntl, json, os, sys, time

from hookrun.cli import main


def refuse(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


if sys.argv[2] == "without locks":
    fcntl.flock = refuse

ARGV = ["compute.device=cpu", "compute.threads=1", "model=mlp", "task=evaluate", "train.limit_batches=2"]


def run(kind, seed, more):
    log = os.open(f"{kind}-{seed}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1), os.dup2(log, 2)
    return main([*ARGV, *more, f"seed={seed}", f"hydra.{kind}.dir={kind}"])


codes = {}
for kind, (starts, more) in json.loads(sys.argv[1]).items():
    start = time.time() + 0.5
    children = []
    for seed in range(starts):
        child = os.fork()
        if child == 0:
            time.sleep(max(start - time.time(), 0))
            os._exit(run(kind, seed, more))
        children.append(child)
    codes[kind] = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
print(json.dumps(codes))
"""


def program(text: str, *arguments: object) -> list[str]:
    root = Path(__file__).resolve().parents[2]
    head = f"import sys; sys.path.insert(0, {str(root)!r})\n"
    return [sys.executable, "-c", head + text, *map(str, arguments)]
