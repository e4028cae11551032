"""Every action is one source file, one test file and one example under conf/."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hookrun.engine.actions import Action, actions
from hookrun.engine.hook_types import HOOK_TYPES

ROOT = Path(__file__).parents[3]
each_action = pytest.mark.parametrize("action", actions().values())


def words(node: Any) -> set[str]:
    """All values of the key `action` in a YAML document."""
    if isinstance(node, list):
        return set[str]().union(*map(words, node))
    if not isinstance(node, dict):
        return set()
    own = {node["action"]} if isinstance(node.get("action"), str) else set[str]()
    return own.union(*map(words, node.values()))


SHOWN = words([yaml.safe_load(file.read_text()) for file in (ROOT / "conf").rglob("*.yaml")])


@each_action
def test_every_action_has_a_summary_a_test_file_and_an_example(action: type[Action]) -> None:
    summary = (action.__doc__ or "").partition("\n")[0]
    assert action.__doc__ != Action.__doc__ and 0 < len(summary) < 100 and summary.endswith(".")
    module = action.__module__.rpartition(".")[2]
    assert Path(__file__).with_name(f"test_{module}.py").is_file()
    assert action.action_name in SHOWN


@each_action
def test_the_docstring_explains_every_field(action: type[Action]) -> None:
    explained = set(re.findall(r"^ *(\w+): ", inspect.cleandoc(action.__doc__ or ""), re.MULTILINE))
    assert set(action.model_fields) <= explained


@each_action
def test_each_action_has_a_schema_for_editors(action: type[Action]) -> None:
    assert set(action.model_json_schema()["properties"] if action.model_fields else {}) == set(
        action.model_fields
    )


def test_every_hook_type_supports_an_action() -> None:
    assert set().union(*(action.hook_types for action in actions().values())) == set(HOOK_TYPES.values())


def test_the_actions_are_listed_without_importing_torch() -> None:
    code = (
        "import sys; from hookrun.engine.actions import actions; actions(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
