"""The command line, in process: `main(argv)` does what ``python -m hookrun`` and the script `hookrun` do."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NoReturn

from hookrun.command.json_output import answered
from hookrun.command.outcome import Outcome
from hookrun.command.sweeps.exit_codes import REFUSED, exit_code, report
from hookrun.errors import HookrunError, Refusal, paths_refused
from hookrun.run.ranks import is_main
from hookrun.signals import code_of, handled
from hookrun.terminal import waiting, waiting_for, words

_AFTER_MAIN = 5.0
"""Seconds that other ranks wait after a refusal: when one ends, torchrun ends rank 0, which has to report it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    0 done; 1 the run failed; 2 a wrong configuration, selector or file; 3 a `check` hook failed;
    128 + its number where a signal ended the run: 130 SIGINT, 143 SIGTERM, 129 SIGHUP, 138 SIGUSR1. Errors go to
    stderr as plain text. It may be called again in the same process: `sys.argv`, the loggers, the signal handlers
    and an application's own Hydra are restored afterwards.
    """
    code = answered(argv, partial(carried_out, goes_on=argv is not None))
    if argv is None and "WORLD_SIZE" in os.environ:
        if code == REFUSED and not is_main():
            signal.signal(signal.SIGTERM, lambda *_: _leave(code))
            time.sleep(_AFTER_MAIN)
        _leave(code)
    return code


@contextmanager
def entered(arguments: list[str], *, goes_on: bool = True) -> Iterator[None]:
    """In the block the process has the streams and the `sys.argv` of a command, and then its own again.

    goes_on: whether the process goes on after the command
    """
    outer = sys.argv
    was_frozen = gc.get_freeze_count() > 0
    sys.argv = ["hookrun", *arguments]  # for which Hydra's shell completion works, unlike for `python -m`
    try:
        with waiting(arguments), words():
            waiting_for("reading the configuration")
            yield
    finally:
        sys.argv = outer
        if goes_on and not was_frozen:  # see `import_torch`
            gc.unfreeze()


def carried_out(arguments: list[str], outcome: Outcome, *, goes_on: bool = True) -> int:
    """Carry out a command and return its exit code; an error is reported, and kept in the outcome.

    goes_on: whether the process goes on after the command
    """
    with entered(arguments, goes_on=goes_on):
        return _main(arguments, outcome)


def _main(arguments: list[str], outcome: Outcome) -> int:
    try:
        with handled(), paths_refused():
            from hookrun.command.cli.commands import execute

            code = execute(arguments, outcome)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except SystemExit as stop:  # argparse: 0 after --version, 2 for a wrong flag
        return stop.code if isinstance(stop.code, int) else 2
    except KeyboardInterrupt as interruption:
        outcome.errors.append(HookrunError(str(interruption) or "interrupted"))
        return code_of(interruption)
    except Exception as error:
        outcome.errors.append(error)
        is_for_main = isinstance(error, Refusal) and not is_main()  # rank 0 reports a wrong configuration
        if not is_for_main:
            report(error)
        if isinstance(error, HookrunError) and "WORLD_SIZE" in os.environ:
            from hookrun.command.cli.running import told_to_ranks

            if not told_to_ranks(error) and is_for_main:
                report(error)
        return exit_code(error)


def _leave(code: int) -> NoReturn:
    """End a rank's process with this exit code, without freeing what is left in memory.

    One of gloo's threads may still have to free the tensor of a finished collective, for which it needs Python's lock.
    Python ends such a thread in the middle when it ends itself, which aborts the process (pytorch issue 190489).
    """
    threading._shutdown()  # type: ignore[attr-defined]  # joins every thread that is not a daemon
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader is gone, or it is closed
            if stream is not None:
                stream.flush()
    os._exit(code)
