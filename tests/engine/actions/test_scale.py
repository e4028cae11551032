"""`scale`, `add_bias` and `replace` on a number, a list or a tensor: what torch computes with the same operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_site import build
from torch import Tensor

from hookrun.engine.actions import Action, actions
from hookrun.engine.actions.scale import Scale

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
BY_HAND: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "scale": lambda x, value: x * value,
    "add_bias": lambda x, value: x + value,
    "replace": lambda x, value: torch.empty_like(x).copy_(torch.as_tensor(value, dtype=torch.float64)),
}
each_action = pytest.mark.parametrize("name", BY_HAND)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def action_of(name: str, value: Any, **keys: Any) -> Action:
    return actions()[name](**{"factor" if name == "scale" else "value": value, **keys})


@each_action
@each_dtype
@pytest.mark.parametrize("number", [0, 1, -2.5, 0.1])
def test_a_number_acts_as_a_python_float_does(name: str, dtype: torch.dtype, number: float) -> None:
    for shape in ((5, 7), (0, 3), ()):
        x = torch.randn(shape).to(dtype)
        assert torch.equal(build(action_of(name, number))(x), BY_HAND[name](x, float(number))), shape


@each_action
@each_dtype
def test_a_list_goes_along_the_last_dimension_of_any_batch(name: str, dtype: torch.dtype) -> None:
    edit = build(action_of(name, [1, -0.5]))
    for shape in ((4, 2), (1, 2), (0, 2), (3, 4, 2)):
        x = torch.randn(shape).to(dtype)
        assert torch.equal(edit(x), BY_HAND[name](x, torch.tensor([1, -0.5], dtype=dtype))), shape


@each_action
def test_a_tensor_from_a_file_is_converted_to_the_dtype(name: str) -> None:
    values = {"factor" if name == "scale" else "value": torch.full((3, 1), 2.0)}
    x = torch.randn(3, 4).bfloat16()
    new = build(action_of(name, {"file": "f.safetensors"}), values=values)(x)
    assert torch.equal(new, BY_HAND[name](x, 2.0))


@each_action
@pytest.mark.parametrize("shape", [(2,), (2, 4), (5, 1), ()])
def test_a_value_that_would_change_the_shape_is_refused(name: str, shape: tuple[int, ...]) -> None:
    forms = [{}, {"trainable": True}] if name == "add_bias" else [{}]
    for keys in forms:
        with pytest.raises(ValueError) as error:
            build(action_of(name, [1, 2, 3], **keys))(torch.ones(shape))
        assert "[3]" in str(error.value)
        assert str(list(shape)) in str(error.value)


@pytest.mark.parametrize("value", [0.5, [0.5, 2.0]])
def test_the_gradient_is_that_of_the_formula(value: Any) -> None:
    for name, slope in (("scale", torch.tensor(value)), ("add_bias", torch.tensor(1.0))):
        x = torch.randn(3, 2, requires_grad=True)
        build(action_of(name, value))(x).sum().backward()
        assert torch.equal(x.grad, slope.expand(3, 2)), name
    assert not build(action_of("replace", value))(x).requires_grad


@pytest.mark.parametrize("factor", [0.1, -2.7, 1 / 3, 9.99, 1.001])
def test_half_precision_does_not_round_the_factor_first(factor: float) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = (x.double() * factor).bfloat16()
    assert torch.equal(build(Scale(factor=factor))(x), exact)
