"""A run directory has one writer at a time, which holds a lock that the operating system releases when it ends.

The lock is `flock` on the file `.lock`. It is released with its process, also one that is killed. A lock file that is
left over has no effect and never has to be removed.
"""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hookrun.store.files import StoreError, make_folder, os_reason
from hookrun.store.format import LOCK

try:
    import fcntl
except ImportError:  # Windows has no flock: two writers are not kept apart there
    fcntl = None  # type: ignore[assignment]

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Errors of a file system that does not support locks, such as some on clusters."""

_MOST_TOLD = 200
"""The number of bytes that are read from a lock file to say who holds it."""


class LockedError(StoreError):
    """Another process is writing into the directory."""


class _Held:
    """The file descriptors of the locks that this process holds."""

    def __init__(self) -> None:
        self.descriptors = set[int]()

    @contextmanager
    def until_the_end(self, descriptor: int) -> Iterator[None]:
        """Hold the lock of the descriptor during the block."""
        self.descriptors.add(descriptor)
        try:
            yield
        finally:
            self.descriptors.discard(descriptor)
            os.close(descriptor)

    def leave_to_parent(self) -> None:
        """Close them in a forked child, such as a worker that loads data: it must not hold its parent's locks."""
        for descriptor in self.descriptors:
            with suppress(OSError):
                os.close(descriptor)
        self.descriptors.clear()


_held = _Held()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_held.leave_to_parent)


@contextmanager
def sole_writer(folder: Path, within: Path | None = None) -> Iterator[None]:
    """Make the folder if it is missing, and be the only process that writes into it during the block.

    A writer of a folder holds the folders inside it too, as a sweep holds those of its jobs.

    within: a folder above whose writer is ignored, as a job ignores its own sweep

    Raises LockedError if another process holds the lock, StoreError if the folder or the lock cannot be created. A
    folder that was created here is removed again if the block leaves it empty.
    """
    made = not folder.exists()
    make_folder(folder)
    try:
        for parent in folder.parents:
            if parent != within:
                refuse_held(parent)
        descriptor = _acquired(folder)
    except BaseException:
        _remove_empty(folder, made)
        raise
    try:
        with _held.until_the_end(descriptor):
            try:
                yield
            finally:
                with suppress(
                    OSError
                ):  # the directory was removed during the run, or the disk became read-only
                    (folder / LOCK).unlink()
    finally:
        _remove_empty(folder, made)


@contextmanager
def locked(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of the folder during the block; wait while another process holds it. Make the folder if needed.

    waiting: called once if another process holds the lock, before this one waits

    Raises StoreError if the folder or the lock cannot be created.
    """
    make_folder(folder)
    try:
        descriptor = _acquired(folder)
    except LockedError:
        waiting()
        descriptor = _acquired(folder, wait=True)
    with _held.until_the_end(descriptor):
        yield


def _acquired(folder: Path, *, wait: bool = False) -> int:
    """A descriptor that holds the lock of the folder."""
    path = folder / LOCK
    while True:
        descriptor = _opened(path, os.O_RDWR | os.O_CREAT)
        try:
            _lock(descriptor, folder, exclusive=True, wait=wait)
            if _is_named(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {platform.node()}".encode())
                return descriptor
        except OSError as error:
            os.close(descriptor)
            raise StoreError(f"cannot write {path}: {os_reason(error)}") from error
        except StoreError:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the previous holder removed the file after this process had opened it


def refuse_held(folder: Path) -> None:
    """Raise LockedError where another process is writing into the folder."""
    if not (folder / LOCK).is_file():
        return
    try:
        descriptor = _opened(folder / LOCK, os.O_RDONLY)
    except StoreError:
        return  # it was just removed, or this process may not open it
    try:
        _lock(descriptor, folder, exclusive=False)
    finally:
        os.close(descriptor)


def _opened(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0), 0o644)
    except OSError as error:
        raise StoreError(f"cannot open {path}: {os_reason(error)}") from error


def _lock(descriptor: int, folder: Path, *, exclusive: bool, wait: bool = False) -> None:
    """Take the lock; if it is held, wait or raise LockedError.

    A file system that does not support locks does not keep writers apart.
    """
    if fcntl is None:
        return
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, _MOST_TOLD, 0).decode("ascii", "replace")
        who = holder if holder.isprintable() and holder else "another process"
        raise LockedError(f"{folder} is being written by {who}") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise StoreError(f"cannot lock {folder / LOCK}: {os_reason(error)}") from error


def _is_named(descriptor: int, path: Path) -> bool:
    """Whether the open file still has the name `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _remove_empty(folder: Path, made: bool) -> None:
    if made:
        with suppress(OSError):  # it is not empty, or another process has taken it
            folder.rmdir()
