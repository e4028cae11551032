"""Python's garbage collector in a command: it is paused while modules are imported, and skips their objects later.

A collection examines every object that it may free. Most objects of a command belong to modules, which stay to the end.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hookrun.cli.waiting import waiting_for


class _Command:
    """What the command that runs in this process has changed.

    may_freeze:   whether objects are left out of collection until it ends, which a caller may do by itself
    was_enabled:  whether the collector ran before the command
    is_first_job: whether a sweep is running whose first job has not ended
    """

    may_freeze = False
    was_enabled = False
    is_first_job = False


_command = _Command()


def _is_frozen() -> bool:
    """Whether objects are left out of collection. The count goes through all of them."""
    return gc.get_freeze_count() > 0


@contextmanager
def collector_of_command() -> Iterator[None]:
    """Pause the collector until `collect_from_now_on` or the end of the block, which restores its state."""
    if _command.may_freeze or _is_frozen():  # a command within another, or the caller froze its objects
        yield
        return
    _command.may_freeze, _command.was_enabled = True, gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _command.may_freeze = False
        gc.unfreeze()
        if _command.was_enabled:
            gc.enable()


def collect_from_now_on() -> None:
    """Let the collector run again, over the objects that are made from now on."""
    if _command.may_freeze:
        gc.freeze()
        if _command.was_enabled:
            gc.enable()


def import_torch() -> None:
    """Import torch, which takes most of the time before a run starts; the progress line says so meanwhile."""
    if "torch" not in sys.modules:
        waiting_for("importing torch")
        if _command.may_freeze:
            gc.disable()
        import torch  # noqa: F401
    collect_from_now_on()


@contextmanager
def collector_of_jobs() -> Iterator[None]:
    """Around the jobs of a sweep: what exists before the first job, and then after it, is left out of collection."""
    gc.collect()
    collect_from_now_on()
    _command.is_first_job = True
    try:
        yield
    finally:
        _command.is_first_job = False


def release_memory() -> None:
    """Free the memory of the last job of this process, before the next job starts.

    The modules that the first job of a sweep imported remain, and their caches.
    """
    gc.collect()
    if _command.is_first_job:
        _command.is_first_job = False
        collect_from_now_on()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
