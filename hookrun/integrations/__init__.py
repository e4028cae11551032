"""Callbacks for the loops of `lightning` and `transformers`, and models for the harnesses `lm_eval` and `inspect_ai`.

Each is imported, together with its library, when it is first used.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hookrun.errors import HookrunError

_MODULES = ("inspect_ai", "lightning", "lm_eval", "transformers")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hookrun.integrations' has no attribute {name!r}")
    return importlib.import_module(f"hookrun.integrations.{name}")


def __dir__() -> list[str]:
    return sorted(_MODULES)


class NotInstalled(HookrunError, ImportError):
    """The library of an integration is not installed."""

    exit_code = 2


@contextmanager
def needing(library: str, extra: str, module: str = "") -> Iterator[None]:
    """The block imports a library; without it NotInstalled says which extra has it.

    module: the `__name__` of a module that is a command too, which prints the error and ends
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != library:
            raise
        missing = NotInstalled(f"{library} is not installed: pip install 'hookrun[{extra}]'")
        if module == "__main__":
            print(missing, file=sys.stderr)
            sys.exit(missing.exit_code)
        raise missing from error
