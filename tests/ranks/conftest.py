"""Processes that stay for all tests of a session: starting one costs seconds."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

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
        self._busy = ranks

    def end(self, only: int | None = None) -> Ended:
        """Wait for what they were started with."""
        found: list[dict[str, Any]] = []
        for rank, process in enumerate(self._processes[: self._busy]):
            if only is None or rank == only:
                assert process.stdout is not None
                found.append(json.loads(process.stdout.readline()))
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


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.close()


@pytest.fixture
def free_port() -> Callable[[], str]:
    """Gives a port that nobody listens on."""
    return unused_port
