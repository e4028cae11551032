"""Callbacks for the loops of `lightning` and `transformers`, and models for the harnesses `lm_eval` and `inspect_ai`.

Each is imported, together with its library, when it is first used.
"""

from __future__ import annotations

import importlib
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


@contextmanager
def needing(library: str, extra: str) -> Iterator[None]:
    """The block imports a library; without it NotInstalled says which extra has it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != library:
            raise
        message = f"{library} is not installed: pip install 'hookrun[{extra}]'"
        raise NotInstalled(message) from error
