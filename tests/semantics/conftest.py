"""Runs a test that has an argument `alone` with every action on every hook type that allows the action."""

from __future__ import annotations

from pathlib import Path

import pytest
from joint_table import ELSEWHERE, parameters_of

from hookrun.engine.actions import Action, actions
from hookrun.engine.hook_types import HOOK_TYPES

OWN = {"add_parameter": {"name": "extra", "shape": [3]}, "project": {"direction": [1, 2, 2]}}
"""Parameters for modules of three elements; of all other actions those of the joint table."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`alone`: the configuration of one hook, without `select`, with an action on tensors of any kind."""
    if "alone" in metafunc.fixturenames:
        hooks = []
        for name, action in sorted(actions().items()):
            for hook, kind in HOOK_TYPES.items():
                if kind in action.hook_types and action.taken is Action.taken:
                    keys = OWN.get(name) or ELSEWHERE.get((name, hook)) or parameters_of(name)[0]
                    hooks.append({"hook": hook, "action": name, **keys})
        names = [f"{hook['action']}-{hook['hook']}" for hook in hooks]
        metafunc.parametrize("alone", hooks, ids=names)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore the warning about hooks that did nothing, except in test_never_fired.py, which tests the warning."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and item.path.name != "test_never_fired.py":
            item.add_marker(pytest.mark.filterwarnings("ignore::hookrun.HookrunWarning"))
