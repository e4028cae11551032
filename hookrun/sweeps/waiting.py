"""A progress line on the terminal, which is cleared before any other output.

Importing torch takes seconds, and longer from a cold disk. The line is written to stderr only if that is a terminal, so
that it is never in a file or a pipe.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from contextvars import ContextVar
from typing import Any, TextIO

_CLEAR = "\r\x1b[K"
_WIDTH = 79
"""The most characters of the line, so that a terminal does not wrap it."""


class _After:
    """A stream that clears the line before it writes; every other attribute is that of the wrapped stream."""

    def __init__(self, stream: TextIO, show: Callable[[str], None]) -> None:
        self._stream, self._show = stream, show

    def write(self, text: str) -> int:
        self._show("")
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_show: ContextVar[Callable[[str], None] | None] = ContextVar("show", default=None)


def waiting_for(what: str) -> None:
    """Show on the line what the command does now; does nothing outside `waiting`."""
    if (show := _show.get()) is not None:
        show(f"hookrun: {what} …")


def import_torch() -> None:
    """Import torch, which takes most of the time before a run starts; the progress line says so meanwhile."""
    if "torch" in sys.modules:
        return
    waiting_for("importing torch")
    was_enabled = gc.isenabled()
    gc.disable()  # a fifth of a second: almost nothing that an import creates can be freed
    try:
        import torch  # noqa: F401
    finally:
        if was_enabled:
            gc.enable()


def wait_is_over() -> None:
    """Clear the line and do not show it again: the command's own output follows."""
    if (show := _show.get()) is not None:
        show("")
        _show.set(None)


@contextmanager
def waiting(arguments: list[str]) -> Iterator[None]:
    """In the block, `waiting_for` shows a line; anything written to stdout or stderr clears the line."""
    err, out = sys.stderr, sys.stdout
    is_watched = False
    with suppress(ValueError):  # stderr is closed
        is_watched = err is not None and err.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    if not is_watched or any(flag in arguments for flag in _QUIET):
        yield
        return
    is_shown = False

    def show(text: str) -> None:
        nonlocal is_shown
        if text or is_shown:
            # if the terminal is closed, the command's own output will report that
            with suppress(OSError, ValueError):
                err.write(f"{_CLEAR}{text[:_WIDTH]}")
                err.flush()
        is_shown = bool(text)

    token = _show.set(show)
    try:
        with redirect_stderr(_After(err, show)), redirect_stdout(None if out is None else _After(out, show)):
            yield
    finally:
        show("")
        _show.reset(token)


_QUIET = ("--shell-completion", "-sc")  # run by the shell while the user types
