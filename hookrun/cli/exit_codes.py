"""The exit code of a command, and its error report on stderr."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hookrun.errors import CheckFailed, CompileError, HookrunError, SpecError
from hookrun.interruptions import code_of

DONE, FAILED, REFUSED, CHECK = 0, 1, 2, 3


def exit_code(error: BaseException) -> int:
    """What the process returns for an exception."""
    if isinstance(error, HookrunError):
        return error.exit_code
    return code_of(error) if isinstance(error, KeyboardInterrupt) else FAILED


def most_serious(codes: Iterable[int]) -> int:
    """The exit code of a sweep; a job that was ended by a signal takes precedence over all others."""
    order = [DONE, CHECK, FAILED, REFUSED]
    return max(codes, key=lambda code: order.index(code) if code in order else len(order), default=DONE)


def report(error: BaseException, run_dir: Path | None = None) -> None:
    """Print the error on stderr as plain text.

    HYDRA_FULL_ERROR=1 shows every traceback. The traceback of an unexpected exception is saved in the run directory,
    or shown if there is no run directory.
    """
    on_purpose = isinstance(error, HookrunError)
    lines = [str(error) if on_purpose else f"{type(error).__name__}: {error}"]
    trace = "".join(traceback.format_exception(error))
    shown = os.environ.get("HYDRA_FULL_ERROR") == "1" or (run_dir is None and not on_purpose)
    if run_dir is not None:
        lines.append(f"run directory: {run_dir}")
        if not isinstance(error, SpecError | CompileError | CheckFailed):
            file = run_dir / "error.txt"
            try:
                file.unlink(missing_ok=True)  # do not write through a link with that name
                file.write_text(trace, encoding="utf-8")
                lines.append(f"traceback: {file}")
            except OSError as unwritable:
                lines.append(f"traceback: not saved ({unwritable})")
                shown = shown or not on_purpose
                with suppress(OSError):
                    file.unlink(missing_ok=True)  # incomplete because the disk is full
    print(*([trace.rstrip()] if shown else []), *lines, sep="\n", file=sys.stderr, flush=True)
