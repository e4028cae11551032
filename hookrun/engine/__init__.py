"""A hook, from its mapping to its effect: spec, plan, proof, installation. Imports no other room of hookrun.

Values of files and other runs are read by the caller of `compile_plan`, see `Values`. torch is imported when a name is
first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookrun.engine.plan.outside import Values
    from hookrun.engine.prove.trial import Plan, compile_plan
    from hookrun.engine.runtime.install import Installation
    from hookrun.engine.spec import Spec, parse_spec

__all__ = [
    "Installation",
    "Plan",
    "Spec",
    "Values",
    "compile_plan",
    "parse_spec",
]

_HOMES = {
    "Installation": "hookrun.engine.runtime.install",
    "Plan": "hookrun.engine.prove.trial",
    "Spec": "hookrun.engine.spec",
    "Values": "hookrun.engine.plan.outside",
    "compile_plan": "hookrun.engine.prove.trial",
    "parse_spec": "hookrun.engine.spec",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
