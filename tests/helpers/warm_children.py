"""For programs that fork a child for each run: modules that the first child imports are imported for later children.

A training run imports a thousand modules, which takes longer than the run. The parent cannot train itself to import
them, because autograd's threads do not survive a fork.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable


def first_child(run: Callable[[], int]) -> int:
    """Fork a child that exits with the result of `run`, import its modules here, and return its exit code."""
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
            with contextlib.suppress(Exception):  # some are created at run time and cannot be imported
                importlib.import_module(name)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
