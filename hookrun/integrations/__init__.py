"""Callbacks for the loops of `lightning` and `transformers`, and models for the harnesses `lm_eval` and `inspect_ai`.

Each is imported, together with its library, when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = ("inspect_ai", "lightning", "lm_eval", "transformers")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hookrun.integrations' has no attribute {name!r}")
    return importlib.import_module(f"hookrun.integrations.{name}")


def __dir__() -> list[str]:
    return sorted(_MODULES)
