"""The jobs of a command: a run, a sweep, the runs that an experiment needs; and what it leaves out of collections."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_freezes: ContextVar[bool] = ContextVar("freezes", default=False)


@contextmanager
def freezing(*, until_the_end: bool) -> Iterator[None]:
    """A command, in which `freeze` acts unless the process has frozen objects of its own.

    until_the_end: the process ends with the command; otherwise its objects are collected again afterwards
    """
    freezes = gc.get_freeze_count() == 0
    token = _freezes.set(freezes)
    try:
        yield
    finally:
        _freezes.reset(token)
        if freezes and not until_the_end:
            gc.unfreeze()


def freeze() -> None:
    """Leave the objects that exist now out of the collections of the command, see `freezing`."""
    if _freezes.get():
        gc.freeze()
