"""The streams of a command: control characters are escaped, and a reader that is gone does not end the command.

What a command prints may come from a file of somebody else: names, values, comments, paths. All of it passes here, also
what Hydra, the logging library and Python's warnings print.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from io import UnsupportedOperation
from typing import Any, TextIO, cast

from hookrun.errors import printable

UNREAD = 1.0
"""Seconds in which the reader of a full pipe has to read something; after that, nobody reads it."""


class Words:
    """A stream for a person. Characters that a terminal acts on are escaped, except line breaks and tabs.

    rich, whose console escapes texts itself, writes its colours to `rich_proxied_file`. Other libraries see no
    terminal, so that they leave out theirs.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.rich_proxied_file = getattr(stream, "rich_proxied_file", stream)

    def write(self, text: str) -> int:
        """Write the text, or nothing if the reader has gone away."""
        again = "\r" if text.startswith("\r") else ""  # the progress bar of a library
        with _reader_may_leave(self._stream):
            self._stream.write(again + printable(text.removeprefix(again), kept="\n\t"))
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        with _reader_may_leave(self._stream):
            self._stream.flush()

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


@contextmanager
def _reader_may_leave(stream: TextIO) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        discard(stream)
