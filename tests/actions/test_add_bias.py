"""`add_bias`: x + value, constant or trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_site import FakeSite, build

from hookrun.actions.add_bias import AddBias
from hookrun.hook_types import FORWARD, FORWARD_PRE, HOOK_TYPES

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0, -1, 0.1])
def test_a_number_adds_as_a_python_float_does(dtype: torch.dtype, value: float) -> None:
    x = torch.randn(5, 7).to(dtype)
    assert torch.equal(build(AddBias(value=value))(x), x + float(value))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_list_adds_along_the_last_dimension(dtype: torch.dtype) -> None:
    x = torch.randn(4, 2).to(dtype)
    assert torch.equal(build(AddBias(value=[1, -0.5]))(x), x + torch.tensor([1, -0.5], dtype=dtype))


@pytest.mark.parametrize("shape", [(2,), (5, 1), ()])
@pytest.mark.parametrize("trainable", [False, True])
def test_a_bias_that_would_change_the_shape_is_refused(shape: tuple[int, ...], trainable: bool) -> None:
    add = build(AddBias(value=[1, 2, 3], trainable=trainable))
    with pytest.raises(ValueError) as error:
        add(torch.ones(shape))
    assert "[3]" in str(error.value) and str(list(shape)) in str(error.value)


@pytest.mark.parametrize("value", [0.5, [0.5, 2.0]])
def test_the_gradient_passes_unchanged(value: Any) -> None:
    x = torch.randn(3, 2, requires_grad=True)
    build(AddBias(value=value))(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_trainable_bias_learns_in_its_own_dtype(dtype: torch.dtype) -> None:
    action = AddBias(value=[1, 2], trainable=True)
    site = FakeSite(action)
    biased = action.build(site)(torch.zeros(3, 2, dtype=dtype))
    assert torch.equal(biased, torch.tensor([[1, 2]] * 3, dtype=dtype))
    biased.sum().backward()
    assert site.bias.dtype == torch.float32
    assert torch.equal(site.bias.grad, torch.tensor([3.0, 3.0]))


def test_a_change_of_the_bias_by_the_optimizer_takes_effect_at_the_next_call() -> None:
    action = AddBias(value=1, trainable=True)
    site = FakeSite(action)
    add = action.build(site)
    with torch.no_grad():
        site.bias += 4
    assert add(torch.zeros(2)).tolist() == [5, 5]


def test_only_a_trainable_bias_adds_a_parameter() -> None:
    assert AddBias(value=0, trainable=True).adds("shift") == "shift_bias"
    assert AddBias(value=0).adds("shift") is None


def test_a_trainable_bias_is_for_forward_hook_types_only() -> None:
    fits = {hook for hook in AddBias.hook_types if AddBias(value=0, trainable=True).carried_by(hook) is None}
    assert fits == {FORWARD, FORWARD_PRE}
    assert all(AddBias(value=0).carried_by(hook) is None for hook in HOOK_TYPES.values())
