"""hookrun: PyTorch hooks as configuration. This module has all public names; they are imported when first needed."""

from __future__ import annotations

import importlib

from hookrun.version import __version__

TYPE_CHECKING = False  # `typing` has the same, and takes as long as all the rest
if TYPE_CHECKING:
    from typing import Any

    from hookrun.api import build, compile, hooked, load_bundle, load_spec, modules, open_run, record
    from hookrun.engine.plan.attention_points import points
    from hookrun.engine.prove.trial import Plan
    from hookrun.engine.runtime.install import Installation
    from hookrun.engine.spec import Spec
    from hookrun.errors import (
        CheckFailed,
        CompileError,
        HookError,
        HookrunError,
        HookrunWarning,
        Problem,
        SpecError,
    )
    from hookrun.in_process import run, sweep
    from hookrun.integrations.recording import Recording
    from hookrun.run.own_loop import ExperimentData
    from hookrun.store.reader import Run
    from hookrun.store.rows import rows
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
    "load_bundle",
    "load_spec",
    "modules",
    "open_run",
    "points",
    "record",
    "rows",
    "run",
    "runs",
    "sweep",
]

_HOMES = {
    "CheckFailed": "hookrun.errors",
    "CompileError": "hookrun.errors",
    "ExperimentData": "hookrun.run.own_loop",
    "HookError": "hookrun.errors",
    "HookrunError": "hookrun.errors",
    "HookrunWarning": "hookrun.errors",
    "Installation": "hookrun.engine.runtime.install",
    "Plan": "hookrun.engine.prove.trial",
    "Problem": "hookrun.errors",
    "Recording": "hookrun.integrations.recording",
    "Run": "hookrun.store.reader",
    "Runs": "hookrun.store.runs",
    "Spec": "hookrun.engine.spec",
    "SpecError": "hookrun.errors",
    "build": "hookrun.api",
    "compile": "hookrun.api",
    "hooked": "hookrun.api",
    "load_bundle": "hookrun.api",
    "load_spec": "hookrun.api",
    "modules": "hookrun.api",
    "open_run": "hookrun.api",
    "points": "hookrun.engine.plan.attention_points",
    "record": "hookrun.api",
    "rows": "hookrun.store.rows",
    "sweep": "hookrun.in_process",
}
_MODULES = ("errors", "extend", "integrations", "run", "runs", "testing")
"""Modules that are found without an import of their own; `run` and `runs` are functions as well."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"hookrun.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'hookrun' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
