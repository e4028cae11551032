"""Python's garbage collector and the memory of a GPU, between the jobs of a command."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hookrun.sweeps.waiting import waiting_for


def import_torch() -> None:
    """Import torch, which takes most of the time before a run starts; the progress line says so meanwhile."""
    if "torch" in sys.modules:
        return
    waiting_for("importing torch")
    was_enabled = gc.isenabled()
    gc.disable()  # a fifth of a second: almost nothing that an import creates can be freed
    try:
        import torch  # noqa: F401
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def modules_not_collected() -> Iterator[None]:
    """In the block, `free_job_memory` skips the objects that exist now, most of which belong to modules."""
    if gc.get_freeze_count():  # the caller has frozen objects itself
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def free_job_memory() -> None:
    """Free the memory of the last job of this process, before the next job starts."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
