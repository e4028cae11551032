"""`replace`: a constant instead of the tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_site import build

from hookrun.actions.replace import Replace

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_a_number_fills_the_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).to(dtype)
    assert torch.equal(build(Replace(value=0.1))(x), torch.full(shape, 0.1, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_list_is_repeated_over_the_leading_dimensions(dtype: torch.dtype) -> None:
    new = build(Replace(value=[1, 2, 3]))(torch.randn(2, 4, 3).to(dtype))
    assert torch.equal(new, torch.tensor([1, 2, 3], dtype=dtype).expand(2, 4, 3))


def test_a_write_to_the_new_tensor_does_not_change_the_constant() -> None:
    value = torch.ones(2, 3)
    replace = build(Replace(value={"file": "f.safetensors"}), values={"value": value})
    replace(torch.zeros(2, 3)).mul_(7)
    assert torch.equal(replace(torch.zeros(2, 3)), torch.ones(2, 3))


def test_the_memory_layout_is_kept() -> None:
    x = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    for value in (0, [1, 2, 3, 4]):
        assert build(Replace(value=value))(x).is_contiguous(memory_format=torch.channels_last)


def test_a_value_that_does_not_broadcast_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \[3\], .*shape \[2, 4\]"):
        build(Replace(value=[1, 2, 3]))(torch.ones(2, 4))


@pytest.mark.parametrize("value", [0, [1, 2, 3]])
def test_no_gradient_flows_back(value: Any) -> None:
    new = build(Replace(value=value))(torch.randn(2, 3, requires_grad=True))
    assert not new.requires_grad
