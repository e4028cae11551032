"""For programs that fork a child for each run: what the first child imports, the later ones find imported.

A training run imports a thousand modules as it goes, which takes longer than the run; the parent cannot train itself,
since the threads of a gradient do not survive a fork.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable


def first_child(run: Callable[[], int]) -> int:
    """Fork a child that ends with what `run` returns, import what it has imported, and return its exit code."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        code = run()
        with os.fdopen(write, "w") as pipe:
            pipe.write("\n".join(sys.modules))
        os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        names = pipe.read().split("\n")
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(Exception):  # some are made as the program runs, and are not to be found
                importlib.import_module(name)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
