"""Tensor arguments are validated strictly; an error says what was found and what is expected."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from hookrun.actions.values import RunValue, Value, fixed_shape, shape_of


def value(raw: Any) -> Any:
    return TypeAdapter(Value).validate_python(raw)


def test_numbers_lists_and_sources_are_read() -> None:
    assert value(2) == 2.0 and value([[1, 2]]) == ((1.0, 2.0),)
    assert fixed_shape(value([[1, 2], [3, 4]])) == (2, 2) and fixed_shape(value(2)) is None
    found = value({"run": "a", "capture": "h", "factor": 2.0, "minus": {"run": "b"}})
    assert isinstance(found, RunValue) and isinstance(found.minus, RunValue)
    assert (found.minus.run, found.minus.capture, found.minus.factor) == ("b", "h", 1.0)
    assert str(found).startswith("2 * (") and " minus " in str(found)


def test_other_values_are_refused_with_what_is_expected() -> None:
    for raw, said in (
        ("inf", r"\.inf"),
        ([[1], [1, 2]], "ragged"),
        ([], "empty"),
        ([True], "expected numbers"),
        ({"key": "x"}, "expected `file`, or `run`"),
    ):
        with pytest.raises(ValidationError, match=said):
            value(raw)
    with pytest.raises(ValueError, match="ragged"):
        shape_of([1, [2]])
