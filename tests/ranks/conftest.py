"""Processes that stay for all tests of a session: starting one costs seconds."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hookrun.store.captures import StoredCapture
from hookrun.store.reader import Run

WORKER = Path(__file__).with_name("worker.py")
ROOT = Path(__file__).resolve().parents[2]


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
    """What came of a command: the exit code and the output of each rank."""

    codes: list[int]
    said: list[str]


class Workers:
    """Processes, each of which runs the same commands as one rank; one that has ended is started anew."""

    def __init__(self) -> None:
        self._processes = list[subprocess.Popen[str]]()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def start(self, folder: Path, *argv: str, ranks: int = 2, leave: bool = False) -> None:
        """Let so many run the command line, one rank each; leave: and end then, as the processes of a run do."""
        port = unused_port()
        while len(self._processes) < ranks:
            self._processes.append(_started())
        for rank in range(ranks):
            if self._processes[rank].poll() is not None:
                _close(self._processes[rank])
                self._processes[rank] = _started()
            stdin = self._processes[rank].stdin
            assert stdin is not None
            about = environment(rank, ranks, port)
            line = {"argv": list(argv), "environment": about, "folder": str(folder), "leaves": leave}
            stdin.write(json.dumps(line) + "\n")
            stdin.flush()
        self._busy, self._leaves = ranks, leave

    def end(self, only: int | None = None) -> Ended:
        """Wait for what they were started with."""
        found: list[dict[str, Any]] = []
        for rank, process in enumerate(self._processes[: self._busy]):
            if only is None or rank == only:
                assert process.stdout is not None
                found.append(json.loads(process.stdout.readline()))
                if self._leaves:
                    process.wait()
        return Ended([each["code"] for each in found], [each["said"] for each in found])

    def run(self, folder: Path, *argv: str, ranks: int = 2, leave: bool = False) -> Ended:
        """Run the command line in so many."""
        self.start(folder, *argv, ranks=ranks, leave=leave)
        return self.end()

    def kill(self, rank: int) -> None:
        """As a machine does that has no memory left."""
        self._processes[rank].kill()
        self._processes[rank].wait()

    def close(self) -> None:
        for process in self._processes:
            _close(process)


def _started() -> subprocess.Popen[str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(WORKER)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables)


def _close(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.wait()
    process.stdout.close()


class Same:
    """What a run of several ranks has to have in common with that of one process."""

    @staticmethod
    def stored(run: Run, name: str = "last") -> dict[str, torch.Tensor]:
        return load_file(run.path / "checkpoints" / f"{name}.safetensors")

    @staticmethod
    def rows_of(run: Run, hook: str, module: str) -> StoredCapture:
        rows = run.captures[hook][module]
        assert isinstance(rows, StoredCapture)
        return rows

    @staticmethod
    def weights(one: Run, two: Run, name: str = "last", atol: float = 1e-6) -> None:
        for key, each in Same.stored(one, name).items():
            assert torch.allclose(each, Same.stored(two, name)[key], atol=atol), (name, key)

    @staticmethod
    def rows(one: Run, two: Run, rtol: float = 1e-4) -> None:
        assert set(one.captures) == set(two.captures)
        for hook, modules in one.captures.items():
            for module in modules:
                rows, others = Same.rows_of(one, hook, module), Same.rows_of(two, hook, module)
                for column in ("sample_ids", "epochs", "steps", "calls", "splits", "positions"):
                    assert torch.equal(getattr(rows, column), getattr(others, column)), (hook, column)
                assert torch.allclose(rows[:], others[:], rtol=rtol, atol=1e-5, equal_nan=True), hook

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


@pytest.fixture(scope="session")
def same() -> type[Same]:
    return Same


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.close()


@pytest.fixture
def new_workers() -> Iterator[Callable[[], Workers]]:
    """Makes two more, for a test that does not leave them alive."""
    made: list[Workers] = []

    def make() -> Workers:
        made.append(Workers())
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="session")
def free_port() -> Callable[[], str]:
    """Gives a port that nobody listens on."""
    return unused_port
