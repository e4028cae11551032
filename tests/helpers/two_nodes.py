"""Two nodes on one machine: processes that see the same path and have different disks behind it.

Where the machine allows it, the processes of node 1 have a mount namespace in which a folder of their own lies over
`disk`. Elsewhere `disk` is a link through the working directory, which differs from node to node.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

from warm_processes import Process, WarmProcesses

_NEW_NAMESPACE = 0x20000
_PRIVATE = 1 << 14 | 1 << 18
_BIND = 1 << 12
_LINKED = "here"


@cache
def has_namespaces() -> bool:
    """Whether this machine lets the tests mount a folder where other processes do not see it."""
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-m", "mount", "--bind", "/tmp", "/tmp"]
    return subprocess.run(command, capture_output=True).returncode == 0


@dataclass(frozen=True)
class Disk:
    """A path behind which each node has another folder.

    path:    what the nodes call it; give it as an absolute path in their commands
    folders: the folder of each node, as the test itself sees them
    starts:  the working directory of each node
    """

    path: Path
    folders: Sequence[Path]
    starts: Sequence[Path]

    @classmethod
    def made(cls, below: Path) -> Disk:
        """Make it, with its folders, in the folder `below`."""
        path = below / "disk"
        if has_namespaces():
            folders = [path, below / "disk_of_node_1"]
            for folder in folders:
                folder.mkdir()
            return cls(path, folders, [below, below])
        starts = [below / "node_0", below / "node_1"]
        for start in starts:
            (start / _LINKED).mkdir(parents=True)
        path.symlink_to(f"/proc/self/cwd/{_LINKED}")
        return cls(path, [start / _LINKED for start in starts], starts)

    @property
    def mount(self) -> list[str]:
        """The folder that lies over `path` on node 1, and `path`; nothing where links are used."""
        return [str(self.folders[1]), str(self.path)] if has_namespaces() else []


def mount_own(folder: str, path: str) -> None:
    """Let this process, which has one thread, see `folder` at `path`; no other process does."""
    libc = ctypes.CDLL(None, use_errno=True)
    results = [
        libc.unshare(_NEW_NAMESPACE),
        libc.mount(None, b"/", None, _PRIVATE, None),
        libc.mount(folder.encode(), path.encode(), None, _BIND, None),
    ]
    if any(results):
        raise OSError(ctypes.get_errno(), f"cannot mount {folder} at {path}: {results}")


@dataclass
class Agent:
    """One `torchrun`, with its output in a file."""

    process: Process
    output: IO[str]

    def wait(self) -> int:
        """Wait for its end; returns the exit code."""
        return self.process.wait(timeout=240)

    def said(self) -> str:
        """What it and its processes have printed so far."""
        self.output.seek(0)
        return self.output.read()

    @property
    def workers(self) -> list[int]:
        """The ids of the processes that it has started."""
        return _children(self.process.pid)

    def kill(self) -> None:
        """Send SIGKILL to it and to its processes, as when the node loses power."""
        if self.process.poll() is None:
            for pid in (self.process.pid, *self.workers):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _children(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have started."""
    with suppress(OSError):
        own = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return [each for child in own for each in (child, *_children(child))]
    return []


_AGENT = """
import os
import sys

from torch.distributed.run import main
from two_nodes import mount_own

start, mounts, *argv = sys.argv[1:]
if mounts:
    mount_own(*mounts.split(os.pathsep))
os.chdir(start)
main(argv)
"""


@contextmanager
def agents(
    warm: WarmProcesses,
    disk: Disk,
    port: str,
    *argv: str,
    restarts: int = 0,
    own_disk: bool = True,
    program: Sequence[str] = ("-m", "hookrun"),
    env: Mapping[str, str] | None = None,
) -> Iterator[list[Agent]]:
    """Two agents of torchrun, each with one process of the command line `argv`; both are killed at the end.

    own_disk: node 1 has its own disk; otherwise both see that of node 0
    """
    started = list[Agent]()
    launcher = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
    launcher += [f"--max-restarts={restarts}"]
    environment = {"OMP_NUM_THREADS": "1", **(env or {})}
    try:
        for node in range(2):
            apart = own_disk and node == 1
            mounts = os.pathsep.join(disk.mount) if apart else ""
            command = [disk.starts[int(apart)], mounts, *launcher, f"--node-rank={node}", *program, *argv]
            output = (disk.path.parent / f"output_of_node_{node}.txt").open("w+")
            process = warm.start(_AGENT, *command, stdout=output, stderr=output, env=environment)
            started.append(Agent(process, output))
        yield started
    finally:
        for agent in started:
            agent.kill()
            agent.output.close()
