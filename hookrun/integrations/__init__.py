"""Callbacks for the loops of other libraries: `hookrun.integrations.lightning` and `.transformers`.

Each is imported, together with its library, when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = ("lightning", "transformers")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hookrun.integrations' has no attribute {name!r}")
    return importlib.import_module(f"hookrun.integrations.{name}")


def __dir__() -> list[str]:
    return sorted(_MODULES)
