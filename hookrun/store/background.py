"""A worker thread that calls functions in order, such as those that write files, while the program goes on."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from torch import Tensor

from hookrun.engine.values.host_copies import HostCopy, copy_to_host
from hookrun.engine.values.tensors import read_together

T = TypeVar("T")
Write = Callable[[Mapping[str, Tensor]], object]
"""Writes tensors, by name."""

MOST_COPIED = 2**26
"""The most bytes of tensors that are copied and written in the background. Six copies may be in memory at once."""

INTERVAL = 0.5
"""Seconds between two writes of the states of quick epochs: a disk that is always busy slows training down."""


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The items, which are not None; a thread makes the next one while the program works with one."""
    with ThreadPoolExecutor(1) as thread:
        upcoming = thread.submit(next, items, None)
        while (item := upcoming.result()) is not None:
            upcoming = thread.submit(next, items, None)
            yield item


@dataclass(eq=False)
class Background:
    """Calls functions one after the other in a thread, which starts with the first one; at most one of them waits.

    A forked child has no such thread: there, nothing is called and nothing is waited for.

    Ctrl-C may interrupt the thread that hands over and waits at any step; waiting may be repeated. After the first
    error nothing more is called; it is raised once, by the next method that is called.

    name:    of the thread
    at_once: `write` uses no thread, for runs that fork processes: a fork beside a running thread is not safe
    failed:  called with the error before it is raised; it may raise another one
    """

    name: str
    at_once: bool = field(default=False, kw_only=True)
    failed: Callable[[BaseException], object] | None = field(default=None, kw_only=True)
    _owner: int = field(default_factory=os.getpid, init=False)
    _error: BaseException | None = field(default=None, init=False)
    _raised: bool = field(default=False, init=False)
    _pool: ThreadPoolExecutor | None = field(default=None, init=False)
    _handed: deque[Future[None]] = field(default_factory=deque, init=False)
    _newest: dict[str, tuple[Write, Mapping[str, HostCopy]]] = field(default_factory=dict, init=False)
    _last: float = field(default=-math.inf, init=False)

    def put(self, call: Callable[[], object]) -> None:
        """Hand over a function; waits while another one waits."""
        if os.getpid() != self._owner:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, self.name)
        while len(self._handed) > 1:  # one is in work, one waits
            wait([self._handed[0]])
            self._handed.popleft()
        self._handed.append(self._pool.submit(self._attempt, call))
        self.raise_error()

    def put_newest(self, *, after: float = 0.0) -> None:
        """Hand over the newest call of `write` for each name, unless that was done less than `after` seconds ago."""
        if not self._newest or time.monotonic() - self._last < after:
            return
        while self._newest:
            name, (write, copies) = next(iter(self._newest.items()))
            self.put(partial(write, {key: copy.wait() for key, copy in copies.items()}))
            del self._newest[name]
        self._last = time.monotonic()

    def write(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
        write: Write,
        *,
        soon: bool = True,
    ) -> None:
        """Call ``write(tensors)``, with copies on the CPU if it is called in the background: training may go on.

        Tensors of an accelerator are copied meanwhile; what hands over the call waits for them.

        What is called in the background is handed over by the next `put_newest`, `wait` or `close`.

        name: of what is written; the call replaces one of the same name that is not handed over yet
        soon: it may be called in the background; False: call it now
        """
        is_small = sum(tensor.nbytes for tensor in tensors.values()) <= MOST_COPIED
        if soon and not self.at_once and is_small:
            self.raise_error()
            copies = {key: copy_to_host(tensor) for key, tensor in tensors.items()}
            self._newest.pop(name, None)  # so that the newest one comes last
            self._newest[name] = write, copies
        else:
            self.wait()
            # larger ones are copied one by one while they are written
            write(dict(zip(tensors, read_together(tensors.values()), strict=True)) if is_small else tensors)

    def wait(self) -> None:
        """Wait until every call is done."""
        self.put_newest()
        if self._pool is not None and os.getpid() == self._owner:
            self._pool.submit(bool).result()  # a call that does nothing, after all others
        self.raise_error()

    def close(self) -> None:
        """Wait until every call is done and the thread has ended; another call starts another thread."""
        try:
            self.put_newest()
        finally:
            if self._pool is not None and os.getpid() == self._owner:
                self._pool.shutdown()
                self._pool = None
                self._handed.clear()
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the error of a call, unless it was raised before."""
        if self._error is not None and not self._raised:
            self._raised = True
            if self.failed is not None:
                self.failed(self._error)
            raise self._error

    def _attempt(self, call: Callable[[], object]) -> None:
        if self._error is None:
            try:
                call()
            except BaseException as error:  # raised where the next call is handed over
                self._error = error
