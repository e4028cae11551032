"""Field types: numbers, names of the module's own parameters, and a single name as a list of one."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from hookrun.actions.fields import Finite, Number, OneOrMore, OwnName, check_order


@pytest.mark.parametrize("raw", [0, -1, 0.5, math.inf, -math.inf])
def test_a_number_is_an_int_or_a_float(raw: float) -> None:
    number = TypeAdapter(Number).validate_python(raw)
    assert number == raw and isinstance(number, float)


@pytest.mark.parametrize("raw", ["0.5", True, None, [1]])
def test_texts_and_booleans_are_not_numbers(raw: Any) -> None:
    with pytest.raises(ValidationError, match="valid number"):
        TypeAdapter(Number).validate_python(raw)


def test_nan_is_refused() -> None:
    with pytest.raises(ValidationError, match="neither above nor below"):
        TypeAdapter(Number).validate_python(math.nan)


@pytest.mark.parametrize("raw", [math.inf, math.nan])
def test_a_finite_number_is_finite(raw: float) -> None:
    with pytest.raises(ValidationError, match="finite number"):
        TypeAdapter(Finite).validate_python(raw)


@pytest.mark.parametrize("name", ["", "child.weight"])
def test_a_name_with_a_dot_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="its name has no dot"):
        TypeAdapter(OwnName).validate_python(name)


def test_one_name_is_a_list_of_one() -> None:
    names = TypeAdapter(OneOrMore[OwnName])
    assert names.validate_python("weight") == ("weight",)
    assert names.validate_python(["weight", "bias"]) == ("weight", "bias")


def test_a_list_has_at_least_one_name() -> None:
    with pytest.raises(ValidationError, match="the list is empty"):
        TypeAdapter(OneOrMore[OwnName]).validate_python([])


def test_a_value_that_is_not_a_list_is_reported_once() -> None:
    with pytest.raises(ValidationError, match="expected a name or a list of names") as error:
        TypeAdapter(OneOrMore[OwnName]).validate_python(3)
    assert error.value.error_count() == 1


@pytest.mark.parametrize(("low", "high"), [(None, None), (None, 0.0), (0.0, None), (1.0, 1.0), (-1.0, 2.0)])
def test_bounds_in_order_pass(low: float | None, high: float | None) -> None:
    check_order(low, high)


def test_the_error_for_bounds_out_of_order_names_both() -> None:
    with pytest.raises(ValueError, match=r"^min 0\.5 is greater than max 0\.1$"):
        check_order(0.5, 0.1)
