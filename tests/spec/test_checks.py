"""Checks of a whole configuration: its size, boolean keys, and the order in which problems are reported."""

from __future__ import annotations

from typing import Any

import pytest

from hookrun import spec
from hookrun.errors import Problem
from hookrun.spec import (
    MAX_DEPTH,
    MAX_INTEGER,
    MAX_NAME,
    MAX_TEXT,
    beyond_limits,
    in_file_order,
    without_boolean_keys,
)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def test_specs_just_within_the_limits_are_accepted() -> None:
    for value in (nested(MAX_DEPTH), "x" * MAX_TEXT, MAX_INTEGER - 1, 1 - MAX_INTEGER, {"n" * MAX_NAME: 1}):
        assert beyond_limits(value) is None


@pytest.mark.parametrize(
    ("value", "where", "what"),
    [
        (nested(MAX_DEPTH + 1), ".".join("a" * 65), "nested more than 64 deep"),
        ({"a": ["x", "x" * (MAX_TEXT + 1)]}, "a.1", "a text of 65,537 characters"),
        ({"a": MAX_INTEGER}, "a", "more than 64 bits"),
        ({"a": {-MAX_INTEGER: 1}}, "a", "more than 64 bits"),
        ({"a": {"n" * (MAX_NAME + 1): 1}}, "a", "a name of 257 characters"),
        ({"a": (2**80, 2**90), "b": 2**99}, "a.0", "more than 64 bits"),
    ],
)
def test_the_first_place_beyond_a_limit_is_reported(value: Any, where: str, what: str) -> None:
    problem = beyond_limits(value)
    assert problem is not None
    assert problem.where == where and what in problem.what


def test_values_are_counted_and_recursive_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "MAX_VALUES", 100)
    assert beyond_limits([1] * 99) is None
    assert "more than 100 values" in str(beyond_limits([1] * 100))
    endless: list[Any] = []
    endless.append(endless)
    assert "nested more than 64 deep" in str(beyond_limits(endless))


def test_each_is_reported_with_its_key_path_at_any_depth() -> None:
    config: dict[Any, Any] = {"hooks": {"h": {True: 1, "select": "fc"}}, False: 2, "seed": 3}
    left, problems = without_boolean_keys(config)
    assert left == {"hooks": {"h": {"select": "fc"}}, "seed": 3}
    assert [each.where for each in problems] == ["hooks.h.True", "False"]
    assert True in config["hooks"]["h"], "the configuration itself is not changed"


def test_arguments_of_a_function_of_the_user_may_have_any_keys() -> None:
    config = {"model": {"args": {"options": {True: 1}}}, "data": {"args": {"by": {False: 2}}}}
    assert without_boolean_keys(config) == (config, [])


def test_the_order_is_that_of_the_file_and_each_is_reported_once() -> None:
    written = {"b": {"y": 1, "x": 2}, "a": 3}
    problems = [Problem(where, "") for where in ("", "a", "b.z", "b.x", "b.y.q", "b", "c", "a")]
    assert [each.where for each in in_file_order(problems, written)] == [
        "",
        "b",
        "b.y.q",
        "b.x",
        "b.z",
        "a",
        "c",
    ]
