"""A process that runs one command line after the other, each as one rank of its own process group.

It answers with the exit code, the output, and every collective of the run with the function of hookrun that called it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from two_nodes import mount_own

from hookrun.cli import main

COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce_scatter_tensor")


def caller() -> str:
    """The innermost function of hookrun that is running, except those that communicate."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        place = frame.f_code.co_filename.rpartition("/hookrun/")[2]
        if place.startswith(("cli/", "runtime/", "store/", "tasks/")):
            return f"{place} {frame.f_code.co_name.removesuffix('_as_rank')}"
        frame = frame.f_back
    return "torch"


@contextlib.contextmanager
def numbered() -> Iterator[list[str]]:
    """Within the block, the collectives that torch's functions start, in their order."""
    import torch
    from torch.distributed.tensor import DTensor

    called: list[str] = []

    def recording(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def record(*args: Any, **kwargs: Any) -> Any:
            called.append(f"{len(called)} {name} {caller()}")
            return function(*args, **kwargs)

        return record

    kept = [(torch.distributed, name) for name in COLLECTIVES] + [(DTensor, "full_tensor")]
    functions = [getattr(owner, name) for owner, name in kept]
    for (owner, name), function in zip(kept, functions, strict=True):
        setattr(owner, name, recording(name, function))
    try:
        yield called
    finally:
        for (owner, name), function in zip(kept, functions, strict=True):
            setattr(owner, name, function)


def run(command: dict[str, object]) -> dict[str, object]:
    said = io.StringIO()
    environment = command["environment"]
    assert isinstance(environment, dict)
    os.environ.update(environment)
    if mount := command["mount"]:
        assert isinstance(mount, list)
        mount_own(*mount)
    os.chdir(str(command["folder"]))
    argv = command["argv"]
    assert isinstance(argv, list)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), numbered() as collectives:
        code = main(argv)
    return {"code": code, "said": said.getvalue(), "collectives": collectives}


if __name__ == "__main__":
    faulthandler.enable()  # where it hangs: kill -ABRT
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(run(command)), file=sys.__stdout__, flush=True)
        if command["leaves"]:  # the end of the process closes its connections, so that others stop waiting
            break
