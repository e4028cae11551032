"""Processes that are shared by all tests of a session: starting one takes seconds."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from run_files import weights
from two_nodes import Disk
from warm_processes import Process, WarmProcesses

from hookrun.store.captures.read import StoredCapture
from hookrun.store.reader import Run

WORKER = Path(__file__).with_name("worker.py")


def unused_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def environment(rank: int, size: int, port: str) -> dict[str, str]:
    """What torchrun sets."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
    return {**{name: str(value) for name, value in names.items()}, "MASTER_PORT": port}


@dataclass
class Ended:
    """The result of a command: the exit code, the output and the collectives of each rank."""

    codes: list[int]
    said: list[str]
    collectives: list[list[str]]


@dataclass
class Worker:
    """A process, its commands and its answers."""

    process: Process
    stdin: IO[str]
    stdout: IO[str]

    @classmethod
    def started(cls, warm: WarmProcesses) -> Worker:
        to_read, to_worker = os.pipe()
        from_worker, to_write = os.pipe()
        process = warm.start(WORKER.read_text(), stdin=to_read, stdout=to_write, stderr=2)
        os.close(to_read), os.close(to_write)
        return cls(process, os.fdopen(to_worker, "w"), os.fdopen(from_worker))

    def close(self) -> None:
        self.stdin.close()
        self.process.wait()
        self.stdout.close()


class Workers:
    """Processes, each of which runs the same commands as one rank; one that has ended is replaced."""

    def __init__(self, warm: WarmProcesses) -> None:
        self._warm = warm
        self._processes = list[Worker]()

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._processes]

    def start(
        self,
        folder: Path,
        *argv: str,
        ranks: int = 2,
        leave: bool = False,
        disk: Disk | None = None,
        last: Sequence[str] = (),
    ) -> None:
        """Start the command line in so many, one rank each; leave: they end afterwards, as those of a run do.

        disk: rank 0 is on node 0, the other ranks are on node 1; the folder is that of their node
        last: more of the command line of the last rank
        """
        port = unused_port()
        while len(self._processes) < ranks:
            self._processes.append(Worker.started(self._warm))
        for rank in range(ranks):
            if self._processes[rank].process.poll() is not None:
                self._processes[rank].close()
                self._processes[rank] = Worker.started(self._warm)
            stdin = self._processes[rank].stdin
            about = environment(rank, ranks, port)
            line: dict[str, Any] = {
                "argv": [*argv, *(last if rank == ranks - 1 else ())],
                "environment": about,
                "leaves": leave,
            }
            line["folder"] = str(folder if disk is None else disk.starts[min(rank, 1)])
            line["mount"] = disk.mount if disk is not None and rank else []
            stdin.write(json.dumps(line) + "\n")
            stdin.flush()
        self._busy, self._leaves = ranks, leave

    def end(self, only: int | None = None) -> Ended:
        """Wait for the started commands to end."""
        found: list[dict[str, Any]] = []
        for rank, worker in enumerate(self._processes[: self._busy]):
            if only is None or rank == only:
                found.append(json.loads(worker.stdout.readline()))
                if self._leaves:
                    worker.process.wait()
        return Ended(*([each[key] for each in found] for key in ("code", "said", "collectives")))

    def run(self, folder: Path, *argv: str, **how: Any) -> Ended:
        """Run the command line in so many processes, see `start`."""
        self.start(folder, *argv, **how)
        return self.end()

    def kill(self, rank: int) -> None:
        """Send SIGKILL, as the kernel does when memory runs out."""
        self._processes[rank].process.kill()
        self._processes[rank].process.wait()

    def close(self) -> None:
        for worker in self._processes:
            worker.close()


class Same:
    """What a run of several ranks must have in common with that of one process."""

    @staticmethod
    def rows_of(run: Run, hook: str, module: str) -> StoredCapture:
        rows = run.captures[hook][module]
        assert isinstance(rows, StoredCapture)
        return rows

    @staticmethod
    def weights(one: Run, two: Run, name: str = "last", atol: float = 1e-6) -> None:
        for key, each in weights(one, name).items():
            assert torch.allclose(each, weights(two, name)[key], atol=atol), (name, key)

    @staticmethod
    def rows(one: Run, two: Run, rtol: float = 1e-4, hooks: Iterable[str] | None = None) -> None:
        """Of these hooks; None: of all, which are the same."""
        assert hooks or set(one.captures) == set(two.captures)
        for hook in hooks or one.captures:
            for module in one.captures[hook]:
                rows = Same.rows_of(one, hook, module)
                others = Same.rows_of(two, hook, module)
                for column in ("sample_ids", "epochs", "steps", "calls", "split_numbers", "positions"):
                    assert torch.equal(getattr(rows, column), getattr(others, column)), (hook, column)
                assert torch.allclose(rows[:], others[:], rtol=rtol, atol=1e-5, equal_nan=True), hook

    @staticmethod
    def folds(one: Run, two: Run, *, exact: bool = False) -> None:
        """Equal counts and labels; exact: every number, else within float32's rounding of a pass."""
        for hook in one.folds:
            for module, fold in one.folds[hook].items():
                other = two.folds[hook][module]
                assert (list(fold.tensors), fold.labels) == (list(other.tensors), other.labels)
                assert torch.equal(fold.count, other.count)
                for name, x in fold.tensors.items():
                    if exact:
                        assert torch.equal(x, other.tensors[name]), name
                    elif x.is_floating_point():
                        assert torch.allclose(x, other.tensors[name].to(x.dtype), rtol=1e-3, atol=1e-4), name

    @staticmethod
    def line(line: dict[str, Any], other: dict[str, Any], rtol: float = 1e-4) -> None:
        """The same keys, equal numbers within float32's rounding of sums, and the rest the same."""
        assert list(line) == list(other)
        for name, value in line.items():
            if isinstance(value, float):
                its = other[name]
                same = repr(value) == repr(its) or math.isclose(value, its, rel_tol=rtol, abs_tol=1e-6)
                assert same, (name, line, other)
            else:
                assert value == other[name], (name, line, other)

    @staticmethod
    def metrics(one: Run, two: Run, rtol: float = 1e-4) -> None:
        for line, other in zip(one.metrics, two.metrics, strict=True):
            Same.line(line, other, rtol)


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    """A path behind which each of two nodes has a disk of its own."""
    return Disk.made(tmp_path)


@pytest.fixture(scope="session")
def same() -> type[Same]:
    return Same


@pytest.fixture(scope="session")
def workers(warm: WarmProcesses) -> Iterator[Workers]:
    made = Workers(warm)
    yield made
    made.close()


@pytest.fixture(scope="session")
def free_port() -> Callable[[], str]:
    """Returns a port that is not in use."""
    return unused_port
