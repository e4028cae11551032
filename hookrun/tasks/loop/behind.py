"""Small files that are written while a run goes on: the loop does not wait for the disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self, TypeVar

from hookrun.store.background import Background

MOST = 2**26
"""Bytes that are copied so that the run can go on; for more it waits. Three pieces may be in memory at once."""


class Writable(Protocol):
    """What a file is to hold."""

    @property
    def bytes(self) -> int:
        """Its size, about."""

    def copied(self) -> Self:
        """The same, which does not change as the run goes on."""


W = TypeVar("W", bound=Writable)


class Behind:
    """Writes one thing after the other, in the order in which they came, in a thread of its own.

    What it raises is raised where the next thing comes, or in `wait` and `close`, once.

    at_once: everything is written before the run goes on: where processes are forked, which no thread is to see
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self._at_once = at_once
        self._disk = Background[Callable[[], object]](_call, "hookrun states")
        self._told = False

    def write(self, what: W, write: Callable[[W], object], *, soon: bool = True) -> None:
        """Call `write` with it.

        soon: it may be called while the program goes on; False: now
        """
        if not soon or self._at_once or what.bytes > MOST:
            self.wait()
            write(what)
            return
        self._tell()
        copy = what.copied()
        self._disk.put(lambda: write(copy))

    def wait(self) -> None:
        """Until everything is written."""
        self._disk.wait()
        self._tell()

    def close(self) -> None:
        """Until everything is written, and the thread has ended."""
        self._disk.stop()
        self._tell()

    def _tell(self) -> None:
        if self._disk.error is not None and not self._told:
            self._told = True
            raise self._disk.error


def _call(write: Callable[[], object]) -> None:
    write()
