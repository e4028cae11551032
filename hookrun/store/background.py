"""A worker thread that processes pieces in order while the program goes on; at most one piece waits.

Ctrl-C may interrupt the thread that hands over and waits at any step, and more than once. So each fact about a piece is
set by one thread only, and waiting for it may be repeated: an interrupted step leaves nothing inconsistent.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")


class Background(Generic[T]):
    """Calls `work` with each piece in a separate thread, which starts with the first piece.

    error: what `work` raised; after that `work` is not called again
    left:  the piece that failed and those after it
    """

    def __init__(self, work: Callable[[T], None], name: str) -> None:
        self.error: BaseException | None = None
        self.left = list[T]()
        self._work = work
        self._name = name
        self._pieces: SimpleQueue[tuple[T, _Progress] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._last: _Progress | None = None

    def put(self, piece: T) -> None:
        """Hand over a piece; waits while another piece waits. If no thread can be started, `work` is called here."""
        if self._thread is None and not self._starts():
            self._attempt(piece)
            return
        if self._last is not None:
            self._last.begun.wait()
        progress = _Progress()
        self._pieces.put((piece, progress))
        self._last = progress

    def wait(self) -> None:
        """Wait until every piece is done."""
        if self._last is not None:
            self._last.done.wait()

    def stop(self) -> None:
        """Wait until every piece is done and the thread has ended; another piece starts another thread."""
        if self._thread is not None:
            self._pieces.put(None)
            self._thread.join()
            self._thread = None

    def _starts(self) -> bool:
        pieces: SimpleQueue[tuple[T, _Progress] | None] = SimpleQueue()
        # a daemon thread does not keep the process alive if `stop` is never called
        thread = Thread(target=self._run, args=(pieces,), name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has a limit for the threads of a process
            return False
        self._pieces, self._thread, self._last = pieces, thread, None
        return True

    def _run(self, pieces: SimpleQueue[tuple[T, _Progress] | None]) -> None:
        while (handed := pieces.get()) is not None:
            piece, progress = handed
            progress.begun.come()
            self._attempt(piece)
            del handed, piece  # so that its memory may be reused
            progress.done.come()

    def _attempt(self, piece: T) -> None:
        if self.error is None:
            try:
                self._work(piece)
                return
            except BaseException as error:  # whoever hands over the next piece raises it
                self.error = error
        self.left.append(piece)


class InTwoSteps(Generic[T, U]):
    """Work in two steps: while the second step of a piece runs, the first step of the next piece is done.

    first:  is called with a piece; its result is what the second step is called with
    undone: is called with that result if the second step fails or is not reached
    """

    def __init__(
        self, first: Callable[[T], U], second: Callable[[U], None], undone: Callable[[U], None], name: str
    ) -> None:
        self._make = first
        self._undone = undone
        self._first = Background(self._hand_on, name)
        self._second = Background(second, f"{name}, second step")

    @property
    def error(self) -> BaseException | None:
        """What a step raised; after that no step is called again."""
        return self._second.error or self._first.error

    def put(self, piece: T) -> None:
        """Queue a piece; blocks while another piece is queued for step 1."""
        self._first.put(piece)

    def wait(self) -> None:
        """Wait until every piece is done."""
        self._first.wait()
        self._second.wait()

    def stop(self) -> None:
        """Wait until every piece is done and both threads have ended; another piece starts them again."""
        self._first.stop()
        self._second.stop()

    def left(self) -> tuple[list[T], list[U]]:
        """After `stop`, the pieces that failed or came later: those for the first step and those for the second."""
        for made in self._second.left:
            self._undone(made)
        return self._first.left, self._second.left

    def _hand_on(self, piece: T) -> None:
        if self._second.error is not None:
            raise self._second.error
        made = self._make(piece)
        try:
            self._second.put(made)
        except BaseException:
            self._undone(made)
            raise


class _Moment:
    """An event that comes once; one thread may wait for it, and wait again after an interruption."""

    def __init__(self) -> None:
        self._has_come = False
        self._lock = Lock()
        self._lock.acquire()

    def come(self) -> None:
        self._has_come = True
        self._lock.release()

    def wait(self) -> None:
        if not self._has_come:
            self._lock.acquire()


class _Progress:
    """The state of the work on one piece."""

    def __init__(self) -> None:
        self.begun = _Moment()
        self.done = _Moment()
