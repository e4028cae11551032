"""Runs a task in a directory, and leaves there how it ended."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from hookrun.errors import HookrunError
from hookrun.store.files import StoreError, os_reason
from hookrun.store.format import JOB, LOCK
from hookrun.store.reader import open_run
from hookrun.store.run_dir import RunDir
from hookrun.store.scores import result
from hookrun.tasks.base import Ready
from hookrun.tasks.goals import goal_of

STOPPED = 3


KEPT = frozenset({LOCK, JOB, ".hydra"})
"""What a run directory holds before its run begins."""


def run_in(ready: Ready, path: Path, go_on: bool = False) -> int:
    """Run the task in the directory `path`.

    go_on: it is the directory of a run that was cut off or failed, and is begun anew

    Returns 0, or 3 if a check with policy `stop` ended the run. Whatever is raised is in status.json before.
    """
    goal = goal_of(ready.experiment)
    if go_on:
        _clear(path)
    run_dir = RunDir.create(path, ready.settings.compute.capture_buffer * 2**20)
    run_dir.set_status("running")
    try:
        with ending(run_dir.close):
            stopped = ready.task.execute(ready, run_dir)
        found = None if goal is None else result(open_run(path).metrics, goal).to_dict()
        run_dir.write_manifest()
    except BaseException as error:
        told(partial(set_failed, run_dir, error))
        raise
    if stopped is not None:
        run_dir.set_status("stopped", stopped)
        print(f"stopped by a check: {stopped}", file=sys.stderr, flush=True)
        return STOPPED
    run_dir.set_status("done", objective=found)
    return 0


def _clear(path: Path) -> None:
    """Remove what a run recorded there."""
    try:
        for each in path.iterdir():
            if each.name in KEPT:
                continue
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each)
            else:
                each.unlink()
    except OSError as error:
        raise StoreError(f"cannot remove {error.filename}: {os_reason(error)}") from error


@contextmanager
def ending(*last: Callable[[], None]) -> Iterator[None]:
    """Do these after the block. Where the block failed, what the disk refuses then is told: the first error counts."""
    try:
        yield
    except BaseException:
        for each in last:
            told(each)
        raise
    for each in last:
        each()


def told(write: Callable[[], None]) -> None:
    """Write; where the disk refuses, say so and go on."""
    try:
        write()
    except StoreError as error:
        print(error, file=sys.stderr, flush=True)


def set_failed(run_dir: RunDir, error: BaseException) -> None:
    """Set the status that an exception leaves."""
    if isinstance(error, KeyboardInterrupt):
        run_dir.set_status("interrupted", str(error) or "interrupted from the keyboard")
    elif isinstance(error, HookrunError):
        run_dir.set_status("failed", str(error), error.exit_code)
    else:
        run_dir.set_status("failed", f"{type(error).__name__}: {error}")
