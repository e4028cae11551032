"""Broadcasting of a value to a tensor, and numbers as operands."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from hookrun.values.tensors import broadcasts, check_broadcast, holds_data, nearest_finite, scalars

SHAPES = st.lists(st.integers(0, 3), max_size=4).map(tuple)


@given(SHAPES, SHAPES)
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
        assert str(list(shape)) in str(error.value) and str(list(onto)) in str(error.value)


def test_a_number_is_an_operand_on_the_cpu_with_any_default_device() -> None:
    with torch.device("meta"):
        tensors = scalars(0.1)
    assert {dtype: (x.dtype, x.device.type, x.item()) for dtype, x in tensors.items()} == {
        torch.float32: (torch.float32, "cpu", torch.tensor(0.1).item()),
        torch.float64: (torch.float64, "cpu", 0.1),
    }


@pytest.mark.parametrize("bound", [0.0, 0.1, -7e4, 1e39, float("inf"), -float("inf")])
def test_a_bound_beyond_a_dtype_is_its_largest_finite_number(bound: float) -> None:
    for dtype, number in nearest_finite(bound).items():
        top = torch.finfo(dtype).max
        assert number == (bound if abs(bound) <= top else top if bound > 0 else -top)
        assert torch.tensor(number, dtype=dtype).isfinite()


def test_fake_and_meta_tensors_hold_no_data() -> None:
    with FakeTensorMode():
        fake = torch.ones(2)
    assert not holds_data(fake)
    assert not holds_data(torch.ones(2, device="meta"))
    assert holds_data(torch.ones(2))
