"""Processes that start at once: forks of a process that has imported torch and hookrun, which takes seconds.

For tests that need a process but do not test its start: to kill it, to send it signals, to run several at once. Its
`-c` program finds torch and hookrun imported, and Hydra with the caches of `quick_hydra`. Tests of imports at start, of
a hash seed or of Python's options still need `subprocess`.
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
    """Starts the server; the server imports nothing until it gets the first request."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="warm-")
        self.address = str(Path(self._folder, "socket"))
        command = [sys.executable, str(SERVER), self.address]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self._folder)


class Process:
    """A started program, with the methods of `subprocess.Popen`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("r")
        self.pid = int(self._lines.readline())
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; returns the exit code, or the negative number of the signal that killed it.

        timeout: seconds after which a TimeoutError is raised
        """
        if self.returncode is None:
            self._connection.settimeout(timeout)
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
                    raise ChildProcessError(f"the server closed the connection of process {self.pid}")
            except BlockingIOError:
                return None
            finally:
                self._connection.setblocking(True)
        return self.wait()

    def kill(self) -> None:
        """Send SIGKILL, as the kernel does when memory runs out."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


@dataclass(frozen=True)
class Done:
    """The result of a program, with the attributes of `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class WarmProcesses:
    """Starts programs through the server. address: the path of the server's socket."""

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
        """Start a program. paths: put first into `sys.path`; streams: files, None: the null device."""
        request = {
            "program": program,
            "argv": [str(each) for each in argv],
            "folder": os.path.abspath(cwd),
            "environment": {**os.environ, **(env or {})},
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
        """Run a program to its end, with empty stdin."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = self.start(program, *argv, cwd=cwd, env=env, paths=paths, stdout=out, stderr=err)
            code = process.wait()
            out.seek(0), err.seek(0)
            return Done(code, out.read(), err.read())
