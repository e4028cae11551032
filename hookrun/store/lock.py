"""A run directory has one writer at a time, which holds a lock that the operating system releases when it ends.

The lock is on the file `.lock`. It is released with its process, also one that is killed. A lock file that is left over
has no effect and never has to be removed. A forked child that leaves a block releases nothing: its parent is in it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from hookrun.store.files import StoreError, make_folder, os_reason
from hookrun.store.format import LOCK

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Errors of a file system that does not support locks, such as some on clusters: it does not keep writers apart."""

_SECONDS = 0.05
"""For how long a lock is tried: `refuse_held` of another process may hold it for a moment."""

_MOST_TOLD = 200
"""The number of bytes that are read from a lock file to say who holds it."""


class LockedError(StoreError):
    """Another process is writing into the directory."""


@contextmanager
def sole_writer(folder: Path, within: Path | None = None) -> Iterator[None]:
    """Make the folder if it is missing, and be the only process that writes into it during the block.

    A writer of a folder holds the folders inside it too, as a sweep holds those of its jobs.

    within: a folder above whose writer is ignored, as a job ignores its own sweep

    Raises LockedError if another process holds the lock, StoreError if the folder or the lock cannot be created. A
    folder that was created here is removed again if the block leaves it empty.
    """
    made, owner = not folder.exists(), os.getpid()
    make_folder(folder)
    try:
        for parent in folder.parents:
            if parent != within:
                refuse_held(parent)
        with _held(folder):
            try:
                yield
            finally:
                if os.getpid() == owner:
                    with suppress(OSError):  # the directory was removed, or the disk became read-only
                        (folder / LOCK).unlink()
    finally:
        if made and os.getpid() == owner:
            with suppress(OSError):  # it is not empty, or another process has taken it
                folder.rmdir()


@contextmanager
def locked(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of the folder during the block; wait while another process holds it. Make the folder if needed.

    waiting: called once if another process holds the lock, before this one waits

    Raises StoreError if the folder or the lock cannot be created.
    """
    make_folder(folder)
    with ExitStack() as stack:
        try:
            stack.enter_context(_held(folder))
        except LockedError:
            waiting()
            stack.enter_context(_held(folder, seconds=-1))
        yield


def refuse_held(folder: Path) -> None:
    """Raise LockedError where another process is writing into the folder."""
    path = folder / LOCK
    if not path.is_file():
        return
    try:
        with open(path, "rb") as file:
            # a shared lock, so that two processes that look do not refuse each other
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _locked(folder) from None
    except OSError:
        return  # it was just removed, this process may not open it, or the file system has no locks


@contextmanager
def _held(folder: Path, seconds: float = _SECONDS) -> Iterator[None]:
    """Hold the lock of the folder during the block. seconds: to wait for it; negative: without end."""
    from filelock import FileLock, Timeout

    path = folder / LOCK
    lock = FileLock(path, seconds, poll_interval=0.01, fallback_to_soft=False, on_acquired=_sign)
    owner = os.getpid()
    try:
        lock.acquire()
    except Timeout:
        raise _locked(folder) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise StoreError(f"cannot lock {path}: {os_reason(error)}") from error
    try:
        yield
    finally:
        if os.getpid() == owner:
            lock.release()


def _sign(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {platform.node()}".encode())


def _locked(folder: Path) -> LockedError:
    holder = "another process"
    with suppress(OSError), open(folder / LOCK, "rb") as file:
        text = file.read(_MOST_TOLD).decode("ascii", "replace")
        holder = text if text and text.isprintable() else holder
    return LockedError(f"{folder} is being written by {holder}")
