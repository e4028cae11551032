"""A worker thread that processes pieces in order, or writes small files, while the program goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Generic, Protocol, Self, TypeVar

MOST_COPIED = 2**26
"""The largest value, in bytes, that is copied and written in the background. Three copies may be in memory at once."""


class Writable(Protocol):
    """The content of a file."""

    @property
    def bytes(self) -> int:
        """The approximate size."""

    def copied(self) -> Self:
        """A copy that does not change while the run continues."""


T = TypeVar("T")
W = TypeVar("W", bound=Writable)


class Background(Generic[T]):
    """Calls `work` with each piece in a separate thread, which starts with the first piece; at most one piece waits.

    Ctrl-C may interrupt the thread that hands over and waits at any step; waiting may be repeated.

    error: what `work` raised; after that `work` is not called again
    left:  the piece that failed and those after it
    """

    def __init__(self, work: Callable[[T], object], name: str) -> None:
        self.error: BaseException | None = None
        self.left = list[T]()
        self._work = work
        self._name = name
        self._pool: ThreadPoolExecutor | None = None
        self._handed = deque[Future[None]]()

    def put(self, piece: T) -> None:
        """Hand over a piece; waits while another piece waits. If no thread can be started, `work` is called here."""
        if self._pool is None and not self._starts():
            self._attempt(piece)
            return
        assert self._pool is not None
        while len(self._handed) > 1:  # one is in work, one waits
            wait([self._handed[0]])
            self._handed.popleft()
        self._handed.append(self._pool.submit(self._attempt, piece))

    def wait(self) -> None:
        """Wait until every piece is done."""
        if self._pool is not None:
            self._pool.submit(_nothing).result()

    def stop(self) -> None:
        """Wait until every piece is done and the thread has ended; another piece starts another thread."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
            self._handed.clear()

    def _starts(self) -> bool:
        pool = ThreadPoolExecutor(1, self._name)
        with suppress(RuntimeError):  # the system has a limit for the threads of a process
            pool.submit(_nothing)
            self._pool = pool
        return self._pool is not None

    def _attempt(self, piece: T) -> None:
        if self.error is None:
            try:
                self._work(piece)
                return
            except BaseException as error:  # whoever hands over the next piece raises it
                self.error = error
        self.left.append(piece)


class BackgroundWriter:
    """Writes values one after the other, in the order of the calls of `write`, in a thread of its own.

    An error of the thread is raised once: by the next `write`, `wait` or `close`.

    at_once: write without a thread, for runs that fork processes: a fork beside a running thread is not safe
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self._at_once = at_once
        self._disk = Background[Callable[[], object]](lambda write: write(), "hookrun states")
        self._raised = False

    def write(self, content: W, write: Callable[[W], object], *, soon: bool = True) -> None:
        """Call ``write(content)``, with a copy of `content` if it is called in the background.

        soon: it may be called in the background; False: call it now
        """
        if not soon or self._at_once or content.bytes > MOST_COPIED:
            self.wait()
            write(content)
            return
        self._raise_error()
        copy = content.copied()
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


def _nothing() -> None:
    """What a thread that was just started does."""
