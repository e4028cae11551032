"""A plugin for pytest: of hookrun only the engine and the ground under it can be imported.

`hookrun.compile` and `hookrun.hooked` are the engine's own then, which reads no files and no other runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
from by_torch import statistics_by_torch
from torch.nn import Module

import hookrun
from hookrun.engine import Installation, Plan, Spec, compile_plan, parse_spec

ENGINE = ("engine", "errors", "examples", "signals", "terminal", "version")
"""The modules of hookrun that stay."""


class EngineOnly(MetaPathFinder):
    """Refuses to import any other room."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        if package == "hookrun" and rest.partition(".")[0] not in ENGINE:
            raise ImportError(f"{fullname} does not belong to the engine")
        return None


def compile(spec: Spec | Mapping[str, Any], model: Module, **options: Any) -> Plan:
    """As `hookrun.compile`, without values of files and runs."""
    whole = spec if isinstance(spec, Spec) else parse_spec(spec)
    return compile_plan(whole, model, **options)


def hooked(model: Module, spec: Spec | Mapping[str, Any], **options: Any) -> Installation:
    """As `hookrun.hooked`."""
    return compile(spec, model).install(model, **options)


@pytest.fixture(scope="session")
def by_torch() -> Callable[[Any], dict[str, float]]:
    """As in the `conftest.py` of all tests, which imports other rooms."""
    return statistics_by_torch


def pytest_configure(config: pytest.Config) -> None:
    """Before any test is imported."""
    config.addinivalue_line("markers", "before_compilers: runs before all other tests")
    others = [
        name for name in sys.modules if name.startswith("hookrun.") and name.split(".")[1] not in ENGINE
    ]
    assert others == []
    sys.meta_path.insert(0, EngineOnly())
    vars(hookrun).update(compile=compile, hooked=hooked)
