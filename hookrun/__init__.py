"""hookrun: PyTorch hooks as configuration. This module has all public names; torch is imported when first needed."""

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
    from hookrun.api import build, compile, hooked, load_spec, open_run, record
    from hookrun.engine.plan.attention_points import points
    from hookrun.engine.prove.trial import Plan
    from hookrun.engine.runtime.install import Installation
    from hookrun.engine.spec import Spec
    from hookrun.in_process import run, sweep
    from hookrun.integrations.recording import Recording
    from hookrun.run.own_loop import ExperimentData
    from hookrun.store.reader import Run
    from hookrun.store.runs import Runs, runs

__all__ = [
    "CheckFailed",
    "CompileError",
    "ExperimentData",
    "HookError",
    "HookrunError",
    "HookrunWarning",
    "Installation",
    "Plan",
    "Problem",
    "Recording",
    "Run",
    "Runs",
    "Spec",
    "SpecError",
    "__version__",
    "build",
    "compile",
    "hooked",
    "load_spec",
    "open_run",
    "points",
    "record",
    "run",
    "runs",
    "sweep",
]

_HOMES = {
    "ExperimentData": "hookrun.run.own_loop",
    "Installation": "hookrun.engine.runtime.install",
    "Plan": "hookrun.engine.prove.trial",
    "Recording": "hookrun.integrations.recording",
    "Run": "hookrun.store.reader",
    "Runs": "hookrun.store.runs",
    "Spec": "hookrun.engine.spec",
    "build": "hookrun.api",
    "compile": "hookrun.api",
    "hooked": "hookrun.api",
    "load_spec": "hookrun.api",
    "open_run": "hookrun.api",
    "points": "hookrun.engine.plan.attention_points",
    "record": "hookrun.api",
    "runs": "hookrun.store.runs",
    "sweep": "hookrun.in_process",
}
_MODULES = ("extend", "integrations", "run", "testing")
"""Modules that are found without an import of their own; `run` can be called, too."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"hookrun.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'hookrun' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
