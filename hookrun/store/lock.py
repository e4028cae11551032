"""One process at a time: a lock on a folder, which the system takes back from a process that was killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hookrun.store.files import StoreError, make_folder, os_reason
from hookrun.store.format import LOCK


@contextmanager
def locked(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of the folder, which is made if it is not there.

    waiting: called once where another process holds it, before this one waits

    Raises StoreError where the file system has no locks.
    """
    import fcntl

    make_folder(folder)
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(folder / LOCK, "ab"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise StoreError(f"cannot lock {folder}: {os_reason(error)}") from error
        yield
