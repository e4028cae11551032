"""Writes small files in a background thread, so that the loop does not wait for the disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self, TypeVar

from hookrun.store.background import Background

MOST = 2**26
"""The largest value, in bytes, that is copied and written in the background. Three copies may be in memory at once."""


class Writable(Protocol):
    """The content of a file."""

    @property
    def bytes(self) -> int:
        """The approximate size."""

    def copied(self) -> Self:
        """A copy that does not change while the run continues."""


W = TypeVar("W", bound=Writable)


class BackgroundWriter:
    """Writes values one after the other, in the order of the calls of `write`, in a thread of its own.

    An error of the thread is raised once: by the next `write`, `wait` or `close`.

    at_once: write without a thread, for runs that fork processes: a fork beside a running thread is not safe
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self._at_once = at_once
        self._disk = Background[Callable[[], object]](_call, "hookrun states")
        self._raised = False

    def write(self, what: W, write: Callable[[W], object], *, soon: bool = True) -> None:
        """Call ``write(what)``, with a copy of `what` if it is called in the background.

        soon: it may be called in the background; False: call it now
        """
        if not soon or self._at_once or what.bytes > MOST:
            self.wait()
            write(what)
            return
        self._raise_error()
        copy = what.copied()
        self._disk.put(lambda: write(copy))
        self._raise_error()  # of a write without a thread, such as Ctrl-C

    def wait(self) -> None:
        """Wait until everything is written."""
        self._disk.wait()
        self._raise_error()

    def close(self) -> None:
        """Wait until everything is written and the thread has ended."""
        self._disk.stop()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._disk.error is not None and not self._raised:
            self._raised = True
            raise self._disk.error


def _call(write: Callable[[], object]) -> None:
    write()
