"""Signals that end a run: the first one lets a loop finish its step, a second one stops at once.

Handled are SIGINT (Ctrl-C), SIGTERM (schedulers, containers), SIGHUP (the terminal was closed) and SIGUSR1 (SLURM,
before the time of a job ends). Only the command line installs the handlers; a program that imports hookrun keeps its
own.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

from hookrun.terminal import discard_unread

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
)

DEFAULTS: Mapping[int, Any] = dict.fromkeys(SIGNALS, signal.SIG_DFL) | {
    signal.SIGINT: signal.default_int_handler
}
"""Signal -> its handler unless a program sets another one."""

SAME = 0.1
"""Seconds within which signals count as one: torchrun, a shell or a scheduler may send the same one twice."""

SIGNALLED = 128
"""The exit code of a process that a signal ended is this plus the number of the signal."""


class Interrupted(KeyboardInterrupt):
    """A signal ended the run. Not a subclass of Exception, so that no `except Exception` treats it as a failure.

    signum:    the number of the signal, the first one where several came
    name:      its name, such as ``SIGTERM``
    exit_code: the exit code of the process: 128 + signum
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


@dataclass
class _State:
    """The signals that this process has received since `handled` was entered.

    owner:     the process that handles them, and not its forked children
    first:     the number of the first signal
    count:     the number of signals, without repetitions within SAME
    last:      when the last of them was received, by the monotonic clock
    listening: the number of running loops that call `pending`
    shielded:  the number of `shielded` blocks that are running
    waiting:   whether a signal is still to be raised
    raised:    what was raised where a signal arrived; None: nothing yet
    ignores:   whether the next signal is ignored
    closing:   whether the handlers are being removed
    """

    owner: int = field(default_factory=os.getpid)
    first: int | None = None
    count: int = 0
    last: float = 0.0
    listening: int = 0
    shielded: int = 0
    waiting: bool = False
    raised: Interrupted | None = None
    ignores: bool = False
    closing: bool = False


_state = _State()


@contextmanager
def handled() -> Iterator[None]:
    """Handle the signals during the block, except those that other code handles or ignores; only in the main thread.

    Raises Interrupted in the block, and after it if the block then ended with another error: pydantic reports a model
    whose construction was interrupted as a wrong one, and other libraries fail while they clean up.
    """
    global _state
    mine = [number for number in SIGNALS if _is_default(number)] if _is_main_thread() else []
    if not mine:
        yield
        return
    state = _state = _State()
    show_lost = sys.unraisablehook
    sys.unraisablehook = partial(_raise_later, show_lost)
    try:
        for number in mine:
            signal.signal(number, _handle)
        try:
            yield
        except Exception as error:
            if state.raised is None:
                raise
            raise state.raised from error
        finally:
            state.closing = True
    finally:
        state.closing = True  # again: a signal may have arrived before the assignment above
        for number in mine:
            signal.signal(number, DEFAULTS[number])
        sys.unraisablehook = show_lost
        _state = _State()


@contextmanager
def interruption_kept() -> Iterator[None]:
    """Raise the Interrupted that left other code of the block if that code then failed in its own `finally`.

    Libraries clean up state that an interruption left incomplete, and raise an AttributeError or the like in its place.
    """
    try:
        yield
    except Exception as error:
        before = error.__context__
        while before is not None and not isinstance(before, Interrupted):
            before = before.__context__
        if before is None:
            raise
        raise before from error


@contextmanager
def listening() -> Iterator[None]:
    """Around a loop that calls `pending` after each step: the first signal is only noted, and the loop raises it.

    If the block ends without an error and a signal was noted but not raised, Interrupted is raised then.
    """
    state = _state
    if not _is_main_thread():
        yield
        return
    state.listening += 1
    try:
        yield
    except BaseException:
        state.waiting = False  # it was raised, or another error is reported
        raise
    finally:
        state.listening -= 1
    _raise_waiting(state)


@contextmanager
def shielded() -> Iterator[None]:
    """Around a short block that must not be interrupted, such as writing a status: a signal takes effect at its end.

    Raises Interrupted after the block, unless a `listening` loop around it will raise it.
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


def ignore_next() -> None:
    """Ignore the next signal; the one after it ends the run as usual.

    When one rank has failed, torchrun sends SIGTERM to the others, and rank 0 still has to write status and page.
    """
    _state.ignores = True


def pending() -> Interrupted | None:
    """The first signal received, as an exception for the caller to raise; None if there was none."""
    return None if _state.first is None else Interrupted(_state.first)


def code_of(interruption: KeyboardInterrupt) -> int:
    """The exit code of an interruption: 130 for one that Python's own handler of Ctrl-C raised."""
    return interruption.exit_code if isinstance(interruption, Interrupted) else SIGNALLED + signal.SIGINT


def left_to_main(_worker: int) -> None:
    """The first call in a process that loads data: ignore signals that a terminal or scheduler sends to all processes.

    The main process finishes its step, for which it needs the data, and then ends its workers: only a SIGTERM from the
    main process ends this process.
    """
    for number in SIGNALS:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # tells which process sent the signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        parent = multiprocessing.parent_process()  # os.getppid() may be the server that forks for it
        number = os.getppid() if parent is None else parent.pid
        threading.Thread(target=_end_for, args=(number,), name="hookrun signals", daemon=True).start()
    sys.excepthook = partial(_unless_cut_off, sys.excepthook)


def _unless_cut_off(show: Callable[..., Any], kind: type[BaseException], *more: Any) -> None:
    """Show an error of a worker, unless the main process closed the connection while the worker wrote to it."""
    if not issubclass(kind, ConnectionError | EOFError):
        show(kind, *more)


def _end_for(parent: int) -> None:
    """End the process at a SIGTERM from its parent.

    The kernel keeps one pending SIGTERM, with its first sender: if another process sent one just before, the parent's
    is lost. The parent sends it again when it exits (`multiprocessing.util`).
    """
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def _handle(signum: int, _frame: FrameType | None) -> None:
    state = _state
    if os.getpid() != state.owner:  # a forked child, which has its parent's handlers: only SIGTERM ends it
        if signum == signal.SIGTERM:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        return
    now = time.monotonic()
    if state.closing or (state.last and now - state.last < SAME):
        return
    state.last = now
    if state.ignores:
        state.ignores = False
        return
    state.count += 1
    discard_unread()
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
    state.raised = Interrupted(state.first)
    raise state.raised


def _raise_later(show: Callable[..., Any], lost: Any) -> None:
    """Raise an Interrupted again that arrived where Python cannot raise, such as in `__del__`; show other errors."""
    if isinstance(lost.exc_value, Interrupted):
        _state.waiting = True
    else:
        show(lost)


def _raise_waiting(state: _State) -> None:
    """Raise the noted signal at the end of a block, unless an outer block will raise it."""
    loop_raises = state.listening and state.count == 1
    if state.waiting and state.first is not None and not state.shielded and not loop_raises:
        state.waiting = False
        raise Interrupted(state.first)


def _say(text: str) -> None:
    """Write a line to stderr without Python's buffer, which other code may be writing to when the signal arrives."""
    if sys.__stderr__ is not None:
        with suppress(OSError, ValueError):  # it is closed
            os.write(sys.__stderr__.fileno(), f"\n{text}\n".encode())


def _is_default(number: int) -> bool:
    """Whether the signal has its default handler, or in a forked child the handler that the parent set here."""
    handler = signal.getsignal(number)
    return handler is DEFAULTS[number] or (handler is _handle and _state.owner != os.getpid())


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
