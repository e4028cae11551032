"""Signals that end a run: the first one lets a loop finish its step, a second one stops at once.

Handled are SIGINT (Ctrl-C), SIGTERM (schedulers, containers), SIGHUP (the terminal is gone) and SIGUSR1 (SLURM, before
it takes the machine away). The handlers are those of the command line: a program of somebody else's keeps its own.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
)

SAME = 0.1
"""Seconds within which signals count as one: a terminal that closes, a shell and a scheduler send theirs twice."""

LATER = 1.0
"""Seconds within which those after the second are left out: what a second one began is over by then."""


SIGNALLED = 128
"""What an exit code is above the number of the signal that ended the process."""


class Interrupted(KeyboardInterrupt):
    """A signal ended the run. It does not derive from Exception, so that nothing on the way takes it for a failure.

    signum:    the number of the signal, the first one where several came
    name:      what it is called, such as ``SIGTERM``
    exit_code: what the process returns: 128 + signum
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)  # the argument that rebuilds it in another process
        self.signum = signum

    @property
    def name(self) -> str:
        return signal.Signals(self.signum).name

    @property
    def exit_code(self) -> int:
        return SIGNALLED + self.signum

    def __str__(self) -> str:
        return f"interrupted by {self.name}"


class _State:
    """What has come in this process since `handled` was entered.

    first:     the number of the first signal
    count:     signals that count
    last:      when the last of them came, by the monotonic clock
    listening: loops under way that ask `pending`
    shielded:  blocks under way that are not to be cut in two
    waiting:   a signal is still to be raised
    closing:   the handlers are being taken off
    """

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.first: int | None = None
        self.count = 0
        self.last = 0.0
        self.listening = 0
        self.shielded = 0
        self.waiting = False
        self.closing = False


_state = _State()
_leaving: list[int] = []


@contextmanager
def handled() -> Iterator[None]:
    """Handle the signals during the block, those that nobody else handles or ignores; only in the main thread.

    Raises Interrupted in the block.
    """
    global _state
    mine = [number for number in SIGNALS if _is_default(number)] if _is_main_thread() else []
    if not mine:
        yield
        return
    state = _state = _State()
    try:
        for number in mine:
            signal.signal(number, _handle)
        try:
            yield
        finally:
            state.closing = True
    finally:
        state.closing = True  # once more: a signal may have come between the two
        for number in mine:
            signal.signal(number, _default(number))
        _state = _State()


@contextmanager
def listening() -> Iterator[None]:
    """A loop that asks `pending` after each step: the first signal is only noted, and it is the loop that raises it.

    What has come and was not raised when the block ends without an error is raised then, as Interrupted.
    """
    state = _state
    if not _is_main_thread():
        yield
        return
    state.listening += 1
    try:
        yield
    except BaseException:
        state.waiting = False  # whoever asked has raised it, or there is an error to tell
        raise
    finally:
        state.listening -= 1
    _raise_waiting(state)


@contextmanager
def shielded() -> Iterator[None]:
    """A short block that is not to be cut in two, such as the writing of a status: a signal waits for its end.

    Raises Interrupted after the block, unless a loop around it listens.
    """
    state = _state
    if not _is_main_thread():
        yield
        return
    state.shielded += 1
    try:
        yield
    finally:
        state.shielded -= 1
    _raise_waiting(state)


def pending() -> Interrupted | None:
    """The signal that has come, for whoever is to raise it; None where none has."""
    return None if _state.first is None else Interrupted(_state.first)


def code_of(interruption: KeyboardInterrupt) -> int:
    """The exit code of an interruption: 130 for one that Python's own handler of Ctrl-C raised."""
    return interruption.exit_code if isinstance(interruption, Interrupted) else SIGNALLED + signal.SIGINT


def left_to_main(_worker: int) -> None:
    """For a process that loads data, as its first call: what a terminal or a scheduler sends to all is not for it.

    The main process finishes its step, for which it needs the data, and then ends its workers: a SIGTERM from it, and
    from nobody else, ends this process.
    """
    for number in SIGNALS:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # without it nobody could tell who sent the signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        parent = (
            multiprocessing.parent_process()
        )  # not os.getppid(): that may be the server that forks for it
        threading.Thread(
            target=_end_for,
            args=(os.getppid() if parent is None else parent.pid,),
            name="hookrun signals",
            daemon=True,
        ).start()

    shown, sys.excepthook = sys.excepthook, lambda *error: _unless_cut_off(shown, *error)


def _unless_cut_off(show: Callable[..., Any], kind: type[BaseException], *more: Any) -> None:
    """The main process may stop in the middle of what it reads from a worker: that is not an error of the worker."""
    if not issubclass(kind, ConnectionError | EOFError):
        show(kind, *more)


def _end_for(parent: int) -> None:
    """End the process at a SIGTERM from its parent.

    The kernel keeps one SIGTERM at a time, with its first sender: while another one's waits here, the parent's is lost.
    The parent's exit sends it again (`multiprocessing.util`).
    """
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def exit_at_next(code: int) -> None:
    """The process is about to end, with everything written: from now on a signal ends it at once, and quietly."""
    global _leaving
    if not _is_main_thread():
        return

    def leave(*_: Any) -> None:
        os._exit(code)

    _leaving = [number for number in SIGNALS if _is_default(number)]
    for number in _leaving:
        signal.signal(number, leave)


@atexit.register  # long before torch registers its own: this one comes after it, the last before Python is taken apart
def _ignore_the_rest() -> None:
    for number in _leaving:
        signal.signal(number, signal.SIG_IGN)


def _handle(signum: int, _frame: FrameType | None) -> None:
    state = _state
    if os.getpid() != state.owner:
        _in_child(signum)
        return
    now = time.monotonic()
    if state.closing or (state.count and now - state.last < (SAME if state.count < 2 else LATER)):
        return
    state.count += 1
    state.last = now
    if state.first is None:
        state.first = signum
    listens = state.listening > 0 and state.count == 1
    if state.shielded or listens:
        state.waiting = True
        if listens:
            _say(
                f"{signal.Signals(signum).name}: the run ends after this step; once more, and it stops at once"
            )
        return
    state.waiting = False
    raise Interrupted(state.first)


def _raise_waiting(state: _State) -> None:
    """Raise what has come in a block that is over, where no other such block is around it."""
    is_first = state.count == 1
    if (
        state.waiting
        and state.first is not None
        and not state.shielded
        and not (is_first and state.listening)
    ):
        state.waiting = False
        raise Interrupted(state.first)


def _in_child(signum: int) -> None:
    """A forked child has the handlers of its parent, who decides when it ends: only SIGTERM is for itself."""
    if signum == signal.SIGTERM:
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)


def _say(text: str) -> None:
    """A line on stderr, past Python's buffers: their owner may be in the middle of writing when a signal comes."""
    if sys.__stderr__ is not None:
        with suppress(OSError, ValueError):  # it is closed
            os.write(sys.__stderr__.fileno(), f"\n{text}\n".encode())


def _is_default(number: int) -> bool:
    """Whether nobody has said what the signal means; a handler of ours that a forked child has is its parent's."""
    found = signal.getsignal(number)
    return found is _default(number) or (found is _handle and _state.owner != os.getpid())


def _default(number: int) -> Any:
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
