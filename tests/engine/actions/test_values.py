"""Fields of actions and values in a spec: numbers, names, lists, tensors and functions, and how they broadcast."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given as examples
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from hookrun.engine.actions.fields import Bound, Finite, Number, OneOrMore, OwnName
from hookrun.engine.actions.values import (
    InlineFunction,
    InlineTensor,
    RunValue,
    Value,
    as_data,
    copy_of,
    fixed_shape,
    shape_of,
)
from hookrun.engine.values.tensors import broadcasts, check_broadcast, scalars


@pytest.mark.parametrize(
    ("kind", "raw", "said"),
    [
        (Number, "0.5", "valid number"),
        (Number, True, "valid number"),
        (Number, None, "valid number"),
        (Number, math.nan, "neither above nor below"),
        (Bound, [1.0, math.nan], "neither above nor below"),
        (Finite, math.inf, "finite number"),
        (Finite, math.nan, "finite number"),
        (OwnName, "", "its name has no dot"),
        (OwnName, "child.weight", "its name has no dot"),
        (OneOrMore[OwnName], [], "the list is empty"),
        (OneOrMore[OwnName], 3, "expected a name or a list of names"),
    ],
)
def test_other_values_of_a_field_are_refused_once(kind: Any, raw: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said) as error:
        TypeAdapter(kind).validate_python(raw)
    assert error.value.error_count() == 1


def value(raw: Any) -> Any:
    return TypeAdapter(Value).validate_python(raw)


def test_a_value_is_read_from_any_form() -> None:
    assert value(2) == 2.0
    assert value([[1, 2]]) == ((1.0, 2.0),)
    assert fixed_shape(value([[1, 2], [3, 4]])) == (2, 2)
    assert fixed_shape(value(2)) is None
    found = value({"run": "a", "capture": "h", "factor": 2.0, "minus": {"run": "b"}})
    assert isinstance(found, RunValue)
    assert isinstance(found.minus, RunValue)
    assert found.minus.run == "b"
    assert found.minus.capture == "h"
    assert found.minus.factor == 1.0
    assert str(found).startswith("2 * (")
    assert " minus " in str(found)


def test_other_values_are_refused_with_what_is_expected() -> None:
    for raw, said in (
        ("inf", r"\.inf"),
        ([[1], [1, 2]], "ragged"),
        ([], "empty"),
        ([True], "expected numbers"),
        ({"key": "x"}, "expected `file`, `run` and"),
        ({"form": 0, "to": 1, "steps": [0, 9]}, "from, to, steps; form: did you mean 'from'"),
    ):
        with pytest.raises(ValidationError, match=said):
            value(raw)
    with pytest.raises(ValueError, match="ragged"):
        shape_of([1, [2]])


SHAPES = st.lists(st.integers(0, 3), max_size=4).map(tuple)


@examples(SHAPES, SHAPES)
def test_a_value_broadcasts_if_torch_can_expand_it(shape: tuple[int, ...], onto: tuple[int, ...]) -> None:
    try:
        torch.empty(shape).expand(onto)
        expands = True
    except RuntimeError:
        expands = False
    assert broadcasts(shape, onto) == expands
    if expands:
        check_broadcast(torch.empty(shape), torch.empty(onto))
    else:
        with pytest.raises(ValueError) as error:
            check_broadcast(torch.empty(shape), torch.empty(onto))
        assert str(list(shape)) in str(error.value)
        assert str(list(onto)) in str(error.value)


def test_a_number_is_an_operand_on_the_cpu() -> None:
    with torch.device("meta"):
        tensors = scalars(0.1)
    assert {dtype: (x.dtype, x.device.type, x.item()) for dtype, x in tensors.items()} == {
        torch.float32: (torch.float32, "cpu", torch.tensor(0.1).item()),
        torch.float64: (torch.float64, "cpu", 0.1),
    }


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_the_dtype_belongs_to_the_value() -> None:
    values = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.float64), torch.zeros(4).int()]
    assert len({InlineTensor(each).digest for each in values}) == len(values)


def test_a_function_is_identified_by_its_content() -> None:
    found = InlineFunction(double)
    assert found == InlineFunction(double)
    assert hash(found) == hash(InlineFunction(double))
    assert "double" in str(found)
    factors = [InlineFunction(lambda x, by=by: x * by) for by in (2, 3)]
    assert factors[0] != factors[1], "a default is part of what it does"
    assert copy.deepcopy(found) is found
    assert copy.copy(found) is found


def test_arguments_are_serialized_as_data() -> None:
    mine = {"weights": [torch.ones(2)], "name": "a", "by": double}
    copied = copy_of(mine)
    mine["weights"][0].zero_()
    mine["weights"].append("more")
    assert copied["weights"][0].tolist() == [1, 1]
    assert len(copied["weights"]) == 1
    assert copied["by"] is double
    assert as_data(copied)["weights"][0]["tensor"] == [2]
    assert as_data({"kind": int, "n": None, 3: (1, 2.5)}) == {
        "kind": "builtins:type",
        "n": None,
        "3": [1, 2.5],
    }
