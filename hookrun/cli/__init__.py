"""The command line, in process: `main(argv)` does what ``python -m hookrun`` and the script `hookrun` do."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hookrun.cli.waiting import waiting, waiting_for
from hookrun.errors import HookrunError
from hookrun.trust import read_once


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    0 done; 1 the run failed; 2 a wrong configuration, selector or file; 3 a `check` hook tripped;
    130 interrupted, or terminated. Errors go to stderr as plain text. It may be called again in the same process:
    `sys.argv`, the loggers and an application's own Hydra are afterwards what they were.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with waiting(arguments):
            waiting_for("reading the configuration")
            return _main(arguments)
    except BrokenPipeError:
        return _reader_gone()


def _main(arguments: list[str]) -> int:
    from hookrun.cli.commands import execute
    from hookrun.cli.jobs import exit_code, report
    from hookrun.cli.logs import loggers_restored

    try:
        with read_once(), _named_hookrun(arguments), loggers_restored(), _terminable():
            code = execute(arguments)
        _flush()
        return code
    except BrokenPipeError:
        raise
    except SystemExit as stop:  # argparse: 0 after --version, 2 for a wrong flag
        return stop.code if isinstance(stop.code, int) else 2
    except (HookrunError, KeyboardInterrupt, Exception) as error:
        if not isinstance(error, KeyboardInterrupt):
            report(error)
        return exit_code(error)


@contextmanager
def _named_hookrun(arguments: Sequence[str]) -> Iterator[None]:
    """Let Hydra see the console script: it completes for that name, never for ``python -m``."""
    outer = sys.argv
    sys.argv = ["hookrun", *arguments]
    try:
        yield
    finally:
        sys.argv = outer


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM, by which schedulers and containers stop a program, ends a run as Ctrl-C does."""

    def terminate(*_: object) -> None:
        raise KeyboardInterrupt("terminated by SIGTERM")

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield  # somebody else decides what it means
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _reader_gone() -> int:
    """Whoever read stdout has left, as ``| head`` does: no error, and nothing more to write at exit."""
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
