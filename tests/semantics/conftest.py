"""Runs a test that has an argument `alone` with every action on every hook type that allows the action."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hookrun.actions import actions
from hookrun.hook_types import HOOK_TYPES

PARAMETERS: dict[str, dict[str, Any]] = {
    "scale": {"factor": 2},
    "clamp": {"max": 0.1},
    "replace": {"value": 0.5},
    "add_bias": {"value": 1},
    "clip_norm": {"max_norm": 0.1},
    "fill": {"value": 1},
    "flip_bits": {"count": 1},
    "add_parameter": {"name": "extra", "shape": [3]},
    "offload": {"to": "cpu"},
    "cast": {"dtype": "bfloat16"},
    "project": {"direction": [1, 2, 2]},
    "init": {"name": "normal_"},
    "prune": {"amount": 0.5},
    "python": {"function": "hookrun.examples:soften"},
}
ON_MODULES: dict[str, dict[str, Any]] = {"python": {"function": "hookrun.examples:shrink"}}


def parameters(action: str, hook: str) -> dict[str, Any]:
    on_modules = ON_MODULES if HOOK_TYPES[hook].phase == "installation" else {}
    return on_modules.get(action, PARAMETERS.get(action, {}))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`alone`: the configuration of one hook, without `select`."""
    if "alone" in metafunc.fixturenames:
        hooks = [
            {"hook": hook, "action": name, **parameters(name, hook)}
            for name, action in sorted(actions().items())
            for hook, kind in HOOK_TYPES.items()
            if kind in action.hook_types
        ]
        names = [f"{hook['action']}-{hook['hook']}" for hook in hooks]
        metafunc.parametrize("alone", hooks, ids=names)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore the warning about hooks that did nothing, except in test_never_fired.py, which tests the warning."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and item.path.name != "test_never_fired.py":
            item.add_marker(pytest.mark.filterwarnings("ignore::hookrun.HookrunWarning"))
