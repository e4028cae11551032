"""A server that has imported everything and runs each program in a fork of itself: see `warm_processes`.

It imports nothing before the first request. Each connection is one program: the server forks a supervisor, which forks
the program's process, sends its id, waits for its end and sends its exit code.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

HOOKS = (
    "+hooks.h={select: relu2, hook: forward, action: capture}",
    "+hooks.n={select: conv1, hook: forward, action: noise}",
    "+hooks.s={select: fc, hook: forward, action: stats}",
)
SMALL = ("compute.device=cpu", "compute.threads=1", "train.limit_batches=1", *HOOKS)


def warm_up() -> None:
    """Import the modules of small runs and fill Hydra's caches; without gradients: threads do not survive a fork."""
    import torch
    import torch._dynamo
    import torch.distributed.fsdp  # every rank needs these two, which take two seconds to import
    from quick_hydra import quick_hydra
    from quick_torch import quick_torch
    from warm_children import first_child

    from hookrun.cli import main

    quick_torch()
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    contextlib.ExitStack().enter_context(quick_hydra())
    here = os.getcwd()
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nothing:
        os.chdir(folder)
        with contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
            main([*SMALL, "task=predict", "hydra.run.dir=predict"])
            first_child(lambda: main(["-m", *SMALL, "train.epochs=1", "seed=1", "hydra.sweep.dir=train"]))
        os.chdir(here)
    os.environ.clear()
    os.environ.update(environment)


def run(program: str, argv: list[str]) -> int:
    """Run a program like `python -c`, without Python's teardown of threads and modules; returns the exit code."""
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["-c", *argv]
    code: Any = 0
    try:
        exec(compile(program, "<program>", "exec"), vars(module))
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code if isinstance(code, int) else int(code is not None)


def started(request: dict[str, Any], streams: list[int]) -> int:
    """Fork a process that runs the requested program; returns its id."""
    process = os.fork()
    if process:
        return process
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, buffering=1, closefd=False) for number, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc, assignment]
    os.closerange(3, 256)  # the server's files
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[:0] = request["paths"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os._exit(run(request["program"], request["argv"]))


def supervise(connection: socket.socket) -> None:
    """Serve one connection: start the program, wait for its end, send its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, streams, _, _ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as lines:
        request = json.loads(lines.read(int.from_bytes(head, "big")))
    process = started(request, streams)
    for stream in streams:
        os.close(stream)
    connection.sendall(f"{process}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with contextlib.suppress(OSError):  # the client may not wait for the exit code
        connection.sendall(f"{code}\n".encode())


def serve(address: str) -> None:
    """Serve connections until stdin is closed, by the end of the process that started the server."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
        is_warm = False
        while True:
            ready, _, _ = select.select([0, listener.fileno()], [], [])
            if 0 in ready:
                return
            connection, _ = listener.accept()
            if not is_warm:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                warm_up()
                signal.signal(signal.SIGCHLD, signal.SIG_IGN)
                is_warm = True
            if os.fork() == 0:
                listener.close()
                supervise(connection)
                os._exit(0)
            connection.close()


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
    serve(sys.argv[1])
