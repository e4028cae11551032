"""Keys that YAML reads as true or false are reported, and removed before the rest is checked."""

from __future__ import annotations

from typing import Any

from hookrun.spec.boolean_keys import without_boolean_keys


def test_each_is_reported_with_its_key_path_at_any_depth() -> None:
    config: dict[Any, Any] = {"hooks": {"h": {True: 1, "select": "fc"}}, False: 2, "seed": 3}
    left, problems = without_boolean_keys(config)
    assert left == {"hooks": {"h": {"select": "fc"}}, "seed": 3}
    assert [each.where for each in problems] == ["hooks.h.True", "False"]
    assert True in config["hooks"]["h"], "the configuration itself is not changed"


def test_arguments_of_a_function_of_the_user_may_have_any_keys() -> None:
    config = {"model": {"args": {"options": {True: 1}}}, "data": {"args": {"by": {False: 2}}}}
    assert without_boolean_keys(config) == (config, [])
