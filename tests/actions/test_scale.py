"""`scale`: x * factor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_site import build

from hookrun.actions.scale import Scale

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [0, 1, -2.5, 0.1, 1e6])
def test_a_number_multiplies_as_a_python_float_does(dtype: torch.dtype, factor: float) -> None:
    x = torch.randn(5, 7).to(dtype)
    assert torch.equal(build(Scale(factor=factor))(x), x * float(factor))


@pytest.mark.parametrize("factor", [0.1, -2.7, 1 / 3, 9.99, 1.001])
def test_half_precision_does_not_round_the_factor_first(factor: float) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = (x.double() * factor).bfloat16()
    assert torch.equal(build(Scale(factor=factor))(x), exact)


def test_a_list_multiplies_along_the_last_dimension() -> None:
    x = torch.randn(4, 2)
    assert torch.equal(build(Scale(factor=[2, 0.5]))(x), x * torch.tensor([2, 0.5]))


def test_a_tensor_from_a_file_is_converted_to_the_dtype() -> None:
    scale = build(Scale(factor={"file": "f.safetensors"}), values={"factor": torch.full((3, 1), 2.0)})
    x = torch.randn(3, 4).bfloat16()
    assert torch.equal(scale(x), x * 2)


def test_the_batch_size_may_change_from_call_to_call() -> None:
    scale = build(Scale(factor=[1, 2, 3]))
    assert [scale(torch.ones(n, 3)).shape[0] for n in (4, 1, 0, 9)] == [4, 1, 0, 9]


def test_a_factor_that_would_change_the_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \[3\].* tensor's shape \[5, 1\]"):
        build(Scale(factor=[1, 2, 3]))(torch.ones(5, 1))


@pytest.mark.parametrize("factor", [0.5, [0.5, 2.0]])
def test_the_gradient_is_scaled_too(factor: Any) -> None:
    x = torch.randn(3, 2, requires_grad=True)
    build(Scale(factor=factor))(x).sum().backward()
    assert torch.equal(x.grad, torch.tensor(factor).expand(3, 2))
