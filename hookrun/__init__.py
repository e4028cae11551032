"""hookrun: PyTorch hooks as configuration. Everything public is here; torch is imported when it is first needed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hookrun.errors import (
    CheckFailed,
    CompileError,
    HookError,
    HookrunError,
    HookrunWarning,
    Problem,
    SpecError,
)
from hookrun.version import __version__

if TYPE_CHECKING:
    from hookrun.api import compile, hooked, load_spec, open_run
    from hookrun.proving import Plan
    from hookrun.runtime.install import Installation
    from hookrun.spec import Spec
    from hookrun.store.reader import Run

__all__ = [
    "CheckFailed",
    "CompileError",
    "HookError",
    "HookrunError",
    "HookrunWarning",
    "Installation",
    "Plan",
    "Problem",
    "Run",
    "Spec",
    "SpecError",
    "__version__",
    "compile",
    "hooked",
    "load_spec",
    "open_run",
]

_HOMES = {
    "Installation": "hookrun.runtime.install",
    "Plan": "hookrun.proving",
    "Run": "hookrun.store.reader",
    "Spec": "hookrun.spec",
    "compile": "hookrun.api",
    "hooked": "hookrun.api",
    "load_spec": "hookrun.api",
    "open_run": "hookrun.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hookrun' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
