"""`cast`: saved tensors in a smaller dtype."""

from __future__ import annotations

import pytest
import torch
from fake_site import build
from torch._subclasses.fake_tensor import FakeTensorMode

from hookrun.engine.actions.base import Packed
from hookrun.engine.actions.cast import Cast


@pytest.mark.parametrize("original", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_the_restored_tensor_is_rounded_once(
    original: torch.dtype, dtype: str, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape, dtype=original, requires_grad=True)
    packed = build(Cast(dtype=dtype))(x)
    assert isinstance(packed, Packed)
    assert packed.tensor.dtype == getattr(torch, dtype)
    assert not packed.tensor.requires_grad
    restored = packed.undo(packed.tensor)
    assert restored.dtype == original
    assert torch.equal(restored, x.detach().to(getattr(torch, dtype)).to(original))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_both_parts_of_a_complex_tensor_are_rounded(dtype: str) -> None:
    x = torch.randn(3, 4, dtype=torch.complex128).conj().t()
    packed = build(Cast(dtype=dtype))(x)
    rounded = [part.to(getattr(torch, dtype)).double() for part in (x.real, x.imag)]
    assert packed.tensor.dtype == getattr(torch, dtype)
    assert torch.equal(packed.undo(packed.tensor), torch.complex(*rounded))


@pytest.mark.parametrize(
    ("original", "dtype"),
    [
        (torch.bfloat16, "float16"),
        (torch.float16, "float16"),
        (torch.float32, "float32"),
        (torch.float16, "float32"),
        (torch.complex64, "float32"),
    ],
    ids=str,
)
def test_a_tensor_that_would_not_get_smaller_is_unchanged(original: torch.dtype, dtype: str) -> None:
    assert build(Cast(dtype=dtype))(torch.ones(2, dtype=original)) is None


def test_it_works_on_fake_tensors() -> None:
    with FakeTensorMode():
        packed = build(Cast(dtype="float16"))(torch.ones(3))
        assert packed.undo(packed.tensor).dtype == torch.float32
