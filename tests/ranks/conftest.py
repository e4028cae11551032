"""Two processes that stay for all tests of a module: starting one costs seconds."""

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
    """Two processes, each of which runs the same commands as one rank."""

    def __init__(self) -> None:
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=variables,
            )
            for _ in range(2)
        ]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def start(self, folder: Path, *argv: str, leave: bool = False) -> None:
        """Let both run the command line, as ranks 0 and 1; leave: and end then, as the processes of a run do."""
        port = unused_port()
        for rank, process in enumerate(self._processes):
            about = environment(rank, 2, port)
            assert process.stdin is not None
            line = {"argv": list(argv), "environment": about, "folder": str(folder), "leaves": leave}
            process.stdin.write(json.dumps(line) + "\n")
            process.stdin.flush()

    def end(self, only: int | None = None) -> Ended:
        """Wait for what they were started with."""
        found: list[dict[str, Any]] = []
        for rank, process in enumerate(self._processes):
            if only is None or rank == only:
                assert process.stdout is not None
                found.append(json.loads(process.stdout.readline()))
        return Ended([each["code"] for each in found], [each["said"] for each in found])

    def run(self, folder: Path, *argv: str, leave: bool = False) -> Ended:
        """Run the command line in both."""
        self.start(folder, *argv, leave=leave)
        return self.end()

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
        for process in self._processes:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture(scope="module")
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
