"""A run directory has one writer at a time, which holds a lock that the operating system releases when it ends.

The lock is on the file `.lock`. It is released with its process, also one that is killed. A lock file that is left over
has no effect and never has to be removed. A forked child that leaves a block releases nothing: its parent is in it.

On a file system without locks the file `.lease` is the lock. It names host and process, and a thread of its holder
renews its time. That of a process that has ended on the same host is taken over at once, any other one when nobody has
renewed it for `LEASE_SECONDS`. A process that finds that another one has taken over its lease ends at once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hookrun.store.files import StoreError, make_folder, open_inside, os_reason
from hookrun.store.format import LEASE, LOCK

if TYPE_CHECKING:
    from filelock import LeaseCompromise, SoftFileLease

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Errors of a file system that does not support locks, such as some on clusters."""

LEASE_SECONDS = 30.0
"""A lease that was not renewed for so long may be taken over; the same for every process."""

RENEWAL_SECONDS = 2.0
"""How often a lease is renewed."""

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
    made = not folder.exists()
    owner = os.getpid()
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
    if (folder / LEASE).is_file():
        _leased(folder).release()
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


def _leased(folder: Path, *, waits: bool = False) -> SoftFileLease:
    """Take the lease of the folder. It is refused when its holder renews it, which is seen after some seconds.

    waits: until it is released instead
    """
    from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout

    path = folder / LEASE
    lease = SoftFileLease(
        path, lease_duration=LEASE_SECONDS, heartbeat_interval=RENEWAL_SECONDS, on_compromise=_end_if_taken
    )
    before = _renewed(path)

    def is_renewed() -> bool:
        return _renewed(path) not in (before, None)

    try:
        try:
            lease.acquire(blocking=waits)
        except Timeout:
            print(f"{_holder(lease)} has the lock of {folder}: looking whether it renews it", flush=True)
            lease.acquire(timeout=2 * LEASE_SECONDS, cancel_check=is_renewed)
    except Timeout:
        raise LockedError(
            f"{folder} is being written by {_holder(lease)}: it holds a lock that may be taken over when it was not "
            f"renewed for {LEASE_SECONDS:g} seconds"
        ) from None
    except (OSError, LeaseSettingsMismatch) as error:
        raise StoreError(f"cannot lock {path}: {error}") from error
    return lease


def _renewed(path: Path) -> int | None:
    """When a lease was renewed, in nanoseconds. It is opened, since NFS tells old times of a file that is not."""
    with suppress(StoreError), open_inside(path) as file:
        return os.fstat(file.fileno()).st_mtime_ns
    return None


def _holder(lease: SoftFileLease) -> str:
    if lease.owner is None:
        return "another process"
    return f"process {lease.owner.pid} on {lease.owner.hostname}"


def _end_if_taken(lost: LeaseCompromise) -> None:
    """End this process, which must not write any more, unless its folder was removed; called by another thread."""
    folder = Path(lost.lock_file).parent
    if lost.reason == "refresh-failed" or not folder.is_dir():
        return  # the next write says why
    print(
        f"another process has taken over {folder}, whose lock this one did not renew for {LEASE_SECONDS:g} seconds: "
        "it ends, and writes nothing more",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


@contextmanager
def _held(folder: Path, seconds: float = _SECONDS) -> Iterator[None]:
    """Hold the lock of the folder during the block. seconds: to wait for it; negative: without end."""
    from filelock import FileLock, Timeout

    path = folder / LOCK
    lock: FileLock | SoftFileLease
    lock = FileLock(path, seconds, poll_interval=0.01, fallback_to_soft=False, on_acquired=_sign)
    owner = os.getpid()
    try:
        lock.acquire()
    except Timeout:
        raise _locked(folder) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise StoreError(f"cannot lock {path}: {os_reason(error)}") from error
        lock = _leased(folder, waits=seconds < 0)
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
        if text and text.isprintable():
            holder = text
    return LockedError(f"{folder} is being written by {holder}")
