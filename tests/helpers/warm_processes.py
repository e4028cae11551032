"""Processes that are there at once: forks of one that has imported torch and hookrun, which takes seconds.

For tests that need a process and not its start: to kill it, to send it signals, to let several run at once. Its `-c`
program finds Python, torch and hookrun imported, and Hydra as `quick_hydra` has it. What a start imports, a hash seed
or an option of Python needs `subprocess` still.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

SERVER = Path(__file__).with_name("warm_server.py")


class WarmServer:
    """Starts the server, which stays small until it is used."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="warm-")
        self.address = str(Path(self._folder, "socket"))
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(SERVER), self.address]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, env=variables, start_new_session=True
        )

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self._folder)


class Process:
    """One program, as `subprocess.Popen` has it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("r")
        self.pid = int(self._lines.readline())
        self.returncode: int | None = None

    def wait(self) -> int:
        """Its exit code, as soon as it has ended; negative: the signal that has killed it."""
        if self.returncode is None:
            self.returncode = int(self._lines.readline())
            self._lines.close()
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        if self.returncode is None:
            self._connection.setblocking(False)
            try:
                if not self._connection.recv(1, socket.MSG_PEEK):
                    raise ChildProcessError(f"nobody knows what became of process {self.pid}")
            except BlockingIOError:
                return None
            finally:
                self._connection.setblocking(True)
        return self.wait()

    def kill(self) -> None:
        """As a machine does that has no memory left."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


@dataclass(frozen=True)
class Done:
    """What `subprocess.run` gives."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class WarmProcesses:
    """address: where the server listens"""

    address: str

    def start(
        self,
        program: str,
        *argv: object,
        cwd: str | Path = ".",
        env: Mapping[str, str] | None = None,
        paths: tuple[str | Path, ...] = (),
        stdin: IO[str] | int | None = None,
        stdout: IO[str] | int | None = None,
        stderr: IO[str] | int | None = None,
    ) -> Process:
        """Start a program; paths: put before all others that Python looks at; streams: files, None: the null device."""
        request = {
            "program": program,
            "argv": [str(each) for each in argv],
            "folder": os.path.abspath(cwd),
            "environment": {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            "paths": [str(path) for path in paths],
        }
        data = json.dumps(request).encode()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.address)
        with open(os.devnull, "r+") as nothing:
            streams = [nothing if stream is None else stream for stream in (stdin, stdout, stderr)]
            files = [stream if isinstance(stream, int) else stream.fileno() for stream in streams]
            socket.send_fds(connection, [len(data).to_bytes(8, "big")], files)
            connection.sendall(data)
            return Process(connection)

    def run(
        self,
        program: str,
        *argv: object,
        cwd: str | Path = ".",
        env: Mapping[str, str] | None = None,
        paths: tuple[str | Path, ...] = (),
    ) -> Done:
        """Run a program to its end, with nothing to read."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = self.start(program, *argv, cwd=cwd, env=env, paths=paths, stdout=out, stderr=err)
            code = process.wait()
            out.seek(0), err.seek(0)
            return Done(code, out.read(), err.read())
