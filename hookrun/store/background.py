"""A worker thread that processes pieces in order while the program goes on; at most one piece waits.

KeyboardInterrupt may be raised between any two statements of the calling thread, repeatedly. So each fact about a piece
is set by one thread only, and waiting for it can be repeated: a skipped statement does no harm.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Generic, TypeVar

from hookrun.store.files import StoreError

T = TypeVar("T")
U = TypeVar("U")


class Background(Generic[T]):
    """Calls `work` with each piece in a separate thread, which starts with the first piece.

    error: what `work` raised; from then on pieces are not worked on
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
        """Queue a piece; blocks while another piece is queued. StoreError if the thread cannot be started."""
        if self._thread is None:
            self._start()
        if self._last is not None:
            self._last.begun.wait()
        progress = _Progress()
        self._pieces.put((piece, progress))
        self._last = progress

    def wait(self) -> None:
        """Until every piece is done."""
        if self._last is not None:
            self._last.done.wait()

    def stop(self) -> None:
        """Wait until every piece is done and the thread has ended; a later `put` starts a new thread."""
        if self._thread is not None:
            self._pieces.put(None)
            self._thread.join()
            self._thread = None

    def _start(self) -> None:
        pieces: SimpleQueue[tuple[T, _Progress] | None] = SimpleQueue()
        # a daemon thread does not keep the process alive if `stop` is never called
        thread = Thread(target=self._run, args=(pieces,), name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the limit on threads is reached
            raise StoreError(f"cannot start the thread {self._name!r}: {error}") from error
        self._pieces, self._thread, self._last = pieces, thread, None

    def _run(self, pieces: SimpleQueue[tuple[T, _Progress] | None]) -> None:
        while (handed := pieces.get()) is not None:
            piece, progress = handed
            progress.begun.come()
            self._attempt(piece)
            del handed, piece  # frees the memory that the piece refers to
            progress.done.come()

    def _attempt(self, piece: T) -> None:
        if self.error is None:
            try:
                self._work(piece)
                return
            except BaseException as error:  # raised again at the next `put`
                self.error = error
        self.left.append(piece)


class InTwoSteps(Generic[T, U]):
    """A pipeline of two steps: step 1 of a piece runs while step 2 of the previous piece runs.

    first:  step 1; its result is the input of step 2
    undone: called with a result of step 1 whose step 2 failed or was never run
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
        """The exception that a step raised, if any; after it no piece is processed."""
        return self._second.error or self._first.error

    def put(self, piece: T) -> None:
        """Queue a piece; blocks while another piece is queued for step 1."""
        self._first.put(piece)

    def wait(self) -> None:
        """Until every piece is done."""
        self._first.wait()
        self._second.wait()

    def stop(self) -> None:
        """Wait until every piece is done and both threads have ended; a later `put` starts them again."""
        self._first.stop()
        self._second.stop()

    def left(self) -> tuple[list[T], list[U]]:
        """The unfinished pieces: inputs of step 1 and inputs of step 2, the failed one first. Call it after `stop`."""
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
    """An event that is set once; one thread waits for it, and may wait again after an interrupt."""

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
