"""Work done by one thread, in order, while the program goes on: at most one piece waits."""

from __future__ import annotations

from collections.abc import Callable
from queue import Queue
from threading import Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Calls `work` with each piece in a thread of its own, which starts with the first.

    error: what `work` raised; from then on pieces are not worked on
    left:  the piece that failed and those after it
    """

    def __init__(self, work: Callable[[T], None], name: str) -> None:
        self.error: BaseException | None = None
        self.left = list[T]()
        self._work = work
        self._name = name
        self._queue = Queue[T | None](maxsize=1)
        self._thread: Thread | None = None

    def put(self, piece: T) -> None:
        """Hand over a piece; waits while another one waits already."""
        if self._thread is None:
            # a daemon: a program that ends without `stop` is not kept
            self._thread = Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put(piece)

    def wait(self) -> None:
        """Until every piece is done."""
        if self._thread is not None:
            self._queue.join()

    def stop(self) -> None:
        """Until every piece is done and the thread has ended; another piece starts another thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while True:
            piece = self._queue.get()
            if piece is not None:
                self._attempt(piece)
            self._queue.task_done()
            if piece is None:
                return

    def _attempt(self, piece: T) -> None:
        if self.error is None:
            try:
                self._work(piece)
                return
            except BaseException as error:  # it is raised where the next piece is handed over
                self.error = error
        self.left.append(piece)
