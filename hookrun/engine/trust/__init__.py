"""User code by name: which packages are trusted, how a name is loaded, how its code is identified.

The packages in HOOKRUN_TRUST are read at the start of a command, before any file could change it. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

VARIABLE = "HOOKRUN_TRUST"

_at_entry: ContextVar[frozenset[str] | None] = ContextVar("trust_at_entry", default=None)


def of_environment() -> frozenset[str]:
    """The packages that HOOKRUN_TRUST named when the command started; outside of a command, those that it names now."""
    recorded = _at_entry.get()
    return _of_now() if recorded is None else recorded


@contextmanager
def read_once(trusted: frozenset[str] | None = None) -> Iterator[None]:
    """A context in which the trusted packages are those of now, or `trusted`, even if the variable changes."""
    token = _at_entry.set(_of_now() if trusted is None else trusted)
    try:
        yield
    finally:
        _at_entry.reset(token)


def _of_now() -> frozenset[str]:
    names = (name.strip() for name in os.environ.get(VARIABLE, "").split(","))
    return frozenset(name for name in names if name)
