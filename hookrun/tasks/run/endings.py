"""How a run ends: its last writes are made even after an error, and its status tells how it failed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from hookrun.errors import HookrunError
from hookrun.signals import code_of, interruption_kept, shielded
from hookrun.store.files import StoreError
from hookrun.store.run_dir import RunDir


@contextmanager
def ending(*last: Callable[[], None]) -> Iterator[None]:
    """Call all of these after the block, even if it raises. After a first error, StoreErrors are only printed."""
    left = list(last)
    try:
        yield
        while left:
            left.pop(0)()
    except BaseException:
        for each in left:
            print_failure(each)
        raise


@contextmanager
def failure_recorded(run_dir: RunDir) -> Iterator[None]:
    """Write an exception of the block to status.json before it is raised, even if several signals arrive."""
    try:
        try:
            with interruption_kept():
                yield
        except BaseException as error:
            _record_failure(run_dir, error)
            raise
    except KeyboardInterrupt as interruption:
        # in case a second signal arrived before the first was recorded
        _record_failure(run_dir, interruption)
        raise


def _record_failure(run_dir: RunDir, error: BaseException) -> None:
    with shielded():
        if not run_dir.ended:
            print_failure(partial(set_failed, run_dir, error))


def print_failure(write: Callable[[], None]) -> None:
    """Call `write`; a StoreError is printed and not raised."""
    try:
        write()
    except StoreError as error:
        print(error, file=sys.stderr, flush=True)


def set_failed(run_dir: RunDir, error: BaseException) -> None:
    """Set the status of the run to `failed` or `interrupted`, with the reason."""
    if isinstance(error, KeyboardInterrupt):
        run_dir.set_status("interrupted", str(error) or "interrupted from the keyboard", code_of(error))
    elif isinstance(error, HookrunError):
        run_dir.set_status("failed", str(error), error.exit_code)
    else:
        run_dir.set_status("failed", f"{type(error).__name__}: {error}")
