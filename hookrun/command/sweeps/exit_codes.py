"""The exit code of a command, and the report of an error on stderr."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hookrun.errors import CheckFailed, CompileError, HookrunError, SpecError, at_module
from hookrun.signals import code_of

DONE, FAILED, REFUSED, CHECK = 0, 1, 2, 3

NEEDED = frozenset(
    {
        *("PIL", "filelock", "hydra", "jinja2", "numpy", "omegaconf", "pydantic", "re2"),
        *("rich", "safetensors", "scipy", "sklearn", "torch", "torchvision", "yaml"),
    }
)
"""The modules of the packages that hookrun cannot run without: `dependencies` in pyproject.toml."""


def exit_code(error: BaseException) -> int:
    """The exit code of the process for an exception."""
    if isinstance(error, HookrunError):
        return error.exit_code
    return code_of(error) if isinstance(error, KeyboardInterrupt) else FAILED


def most_serious(codes: Iterable[int]) -> int:
    """The exit code of a sweep from those of its jobs; the code of a job that a signal ended outranks all others."""
    order = [DONE, CHECK, FAILED, REFUSED]
    return max(codes, key=lambda code: order.index(code) if code in order else len(order), default=DONE)


def _lacking(error: BaseException) -> str:
    """The next step if this Python has hookrun's code without a package that it needs; else empty."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if name not in NEEDED:
        return ""
    return (
        f"{sys.executable} has no module {name!r}, which hookrun needs\n"
        "  in a checkout: scripts/hookrun, which installs it into .venv, or .venv/bin/python -m hookrun; "
        "elsewhere: pip install -e ."
    )


def report(error: BaseException, run_dir: Path | None = None, *, prints: bool = True) -> None:
    """Print the error on stderr, in plain text.

    prints: False: only the traceback is saved

    HYDRA_FULL_ERROR=1 shows every traceback. The traceback of an unexpected exception is saved in the run directory,
    or shown if there is no run directory.
    """
    lacking = _lacking(error)
    is_expected = isinstance(error, HookrunError) or bool(lacking)
    lines = [lacking or (str(error) if is_expected else f"{type(error).__name__}: {error}{at_module(error)}")]
    trace = "".join(traceback.format_exception(error))
    shown = os.environ.get("HYDRA_FULL_ERROR") == "1" or (run_dir is None and not is_expected)
    if run_dir is not None:
        lines.append(f"run directory: {run_dir}")
        if not isinstance(error, SpecError | CompileError | CheckFailed):
            file = run_dir / "error.txt"
            try:
                file.unlink(missing_ok=True)  # never write through a symbolic link of that name
                file.write_text(trace, encoding="utf-8")
                lines.append(f"traceback: {file}")
            except OSError as unwritable:
                lines.append(f"traceback: not saved ({unwritable})")
                shown = shown or not is_expected
                with suppress(OSError):
                    file.unlink(missing_ok=True)  # a full disk may have left a truncated file
    if prints:
        print(*([trace.rstrip()] if shown else []), *lines, sep="\n", file=sys.stderr, flush=True)
