"""The streams of a command: control characters are escaped, and a reader that is gone does not end the command.

What a command prints may come from a file of somebody else: names, values, comments, paths. All of it passes here, also
what Hydra, the logging library and Python's warnings print. A progress line on the terminal is cleared before it.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from io import UnsupportedOperation
from typing import Any, TextIO, cast

from hookrun.errors import printable

UNREAD = 1_000
"""Milliseconds in which the reader of a full pipe has to read something; after that, nobody reads it."""


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
    err = sys.stderr
    is_watched = False
    with suppress(ValueError):  # stderr is closed
        is_watched = err is not None and err.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        is_watched &= not of_a_notebook()
    outer = _line.stream
    _line.stream = err if is_watched and not set(_QUIET) & set(arguments) else None
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
class Guarded:
    """A stream whose reader may go away: what is written from then on goes nowhere.

    A pipe that nobody reads does not end the command. A terminal that is gone does, as its signal SIGHUP does, unless
    that is ignored.
    """

    _stream: TextIO

    def write(self, text: str) -> int:
        """Write the text, or nothing if the reader has gone away."""
        try:
            self._stream.write(text)
        except OSError as error:
            self._discard_gone(error)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, unless the reader has gone away."""
        try:
            self._stream.flush()
        except OSError as error:
            self._discard_gone(error)

    def _discard_gone(self, error: OSError) -> None:
        """Discard the stream if the error says that its reader is gone; raises any other error."""
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise error
        discard(self._stream)
        if error.errno == errno.EIO and callable(signal.getsignal(signal.SIGHUP)):
            signal.raise_signal(signal.SIGHUP)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@dataclass(eq=False)
class Words(Guarded):
    """A stream for a person. Characters that a terminal acts on are escaped, except line breaks and tabs.

    rich, whose console escapes texts itself, writes its colours to `rich_proxied_file`. Other libraries see no
    terminal, so that they leave out theirs.
    """

    @property
    def rich_proxied_file(self) -> TextIO:
        """Where rich writes."""
        _line.show("")
        return cast(TextIO, Guarded(getattr(self._stream, "rich_proxied_file", self._stream)))

    def write(self, text: str) -> int:
        """Write the text, or nothing if the reader has gone away."""
        _line.show("")
        again = "\r" if text.startswith("\r") else ""  # the progress bar of a library
        super().write(again + printable(text.removeprefix(again), kept="\n\t"))
        return len(text)

    def isatty(self) -> bool:
        """False."""
        return False


@contextmanager
def words() -> Iterator[None]:
    """In the block, stdout and stderr are `Words`."""
    with ExitStack() as stack:
        for stream, redirected in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if stream is not None:
                stack.callback(stack.enter_context(redirected(cast(TextIO, Words(stream)))).flush)
        yield


_notes: ContextVar[list[str] | None] = ContextVar("notes", default=None)


@contextmanager
def notes_kept() -> Iterator[list[str]]:
    """Gives a list of the notes that are said in the block."""
    notes: list[str] = []
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def noted(note: str) -> str:
    """The line of a note that is printed now: ``NOTE: …``. `notes_kept` has the note."""
    notes = _notes.get()
    if notes is not None:
        notes.append(note)
    return f"NOTE: {note}"


def is_cell(stream: TextIO) -> bool:
    """Whether what is written to the stream is shown below a cell of a notebook, which knows no codes of terminals."""
    while isinstance(stream, Guarded):
        stream = stream._stream
    return type(stream).__module__.partition(".")[0] == "ipykernel"


def of_a_notebook() -> bool:
    """Whether the process is a notebook's kernel, or was started by one.

    ipykernel tells the processes that it starts that they write to a terminal with colours, whatever they write to.
    It is assumed that only ipykernel, below which front end ever (JupyterLab, VS Code), sets both variables so.
    """
    return os.environ.get("TERM") == "xterm-color" and os.environ.get("GIT_PAGER") == "cat"


def discard(stream: TextIO) -> None:
    """Let the stream write to nowhere from now on, also at exit, when Python flushes it."""
    with open(os.devnull, "wb") as nowhere, suppress(UnsupportedOperation):  # a stream in memory has no file
        os.dup2(nowhere.fileno(), stream.fileno())


def discard_unread() -> None:
    """Discard the output whose reader is gone or does not read: a process that is to end would wait without end."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # it is closed, has no file, or there is none
            ready = select.poll()
            ready.register(stream.fileno(), select.POLLOUT)
            events = ready.poll(UNREAD)
            if not events or events[0][1] & (select.POLLERR | select.POLLHUP):
                discard(stream)
