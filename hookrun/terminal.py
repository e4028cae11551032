"""The streams of a command: control characters are escaped, and a reader that is gone does not end the command.

What a command prints may come from a file of somebody else: names, values, comments, paths. All of it passes here, also
what Hydra, the logging library and Python's warnings print. A progress line on the terminal is cleared before it.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from io import UnsupportedOperation
from typing import Any, TextIO, cast

from hookrun.errors import printable

UNREAD = 1.0
"""Seconds in which the reader of a full pipe has to read something; after that, nobody reads it."""


_CLEAR = "\r\x1b[K"
_WIDTH = 79
"""The most characters of the progress line, so that a terminal does not wrap it."""


class _Line:
    """The progress line; `stream` is the terminal, or None where it is not shown."""

    stream: TextIO | None = None
    is_shown = False

    def show(self, text: str) -> None:
        """Show a text in place of the last one; an empty text clears the line."""
        if self.stream is not None and (text or self.is_shown):
            # if the terminal is closed, the command's own output will report that
            with suppress(OSError, ValueError):
                self.stream.write(f"{_CLEAR}{text[:_WIDTH]}")
                self.stream.flush()
            self.is_shown = bool(text)


_line = _Line()


@contextmanager
def waiting(arguments: list[str]) -> Iterator[None]:
    """In the block, `waiting_for` shows a line on stderr, if that is a terminal: never in a file or a pipe."""
    err, is_watched = sys.stderr, False
    with suppress(ValueError):  # stderr is closed
        is_watched = err is not None and err.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    outer, _line.stream = _line.stream, err if is_watched and not set(_QUIET) & set(arguments) else None
    try:
        yield
    finally:
        wait_is_over()
        _line.stream = outer


_QUIET = ("--shell-completion", "-sc")  # run by the shell while the user types


def waiting_for(what: str) -> None:
    """Show on the line what the command does now; does nothing outside `waiting`."""
    _line.show(f"hookrun: {what} …")


def wait_is_over() -> None:
    """Clear the line and do not show it again: the command's own output follows."""
    _line.show("")
    _line.stream = None


@dataclass(eq=False)
class Words:
    """A stream for a person. Characters that a terminal acts on are escaped, except line breaks and tabs.

    rich, whose console escapes texts itself, writes its colours to `rich_proxied_file`. Other libraries see no
    terminal, so that they leave out theirs.
    """

    _stream: TextIO

    @property
    def rich_proxied_file(self) -> TextIO:
        """Where rich writes."""
        _line.show("")
        return cast(TextIO, getattr(self._stream, "rich_proxied_file", self._stream))

    def write(self, text: str) -> int:
        """Write the text, or nothing if the reader has gone away."""
        _line.show("")
        again = "\r" if text.startswith("\r") else ""  # the progress bar of a library
        try:
            self._stream.write(again + printable(text.removeprefix(again), kept="\n\t"))
        except BrokenPipeError:
            discard(self._stream)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, unless the reader has gone away."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            discard(self._stream)

    def isatty(self) -> bool:
        """False."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def words() -> Iterator[None]:
    """In the block, stdout and stderr are `Words`."""
    with ExitStack() as stack:
        for stream, redirected in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if stream is not None:
                stack.callback(stack.enter_context(redirected(cast(TextIO, Words(stream)))).flush)
        yield


def discard(stream: TextIO) -> None:
    """Let the stream write to nowhere from now on, also at exit, when Python flushes it."""
    with open(os.devnull, "wb") as nowhere, suppress(UnsupportedOperation):  # a stream in memory has no file
        os.dup2(nowhere.fileno(), stream.fileno())


def discard_unread() -> None:
    """Discard the output that nobody reads, for which a process that is to end would wait without end."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # it is closed, has no file, or there is none
            if not select.select((), (stream.fileno(),), (), UNREAD)[1]:
                discard(stream)
