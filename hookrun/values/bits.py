"""Flipping bits of the elements of a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_INTEGERS = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


class Flip(torch.autograd.Function):
    """A copy of x in which bits are flipped; the gradient passes straight through."""

    @staticmethod
    def forward(x: Tensor, at: tuple[Tensor, ...], masks: Tensor) -> Tensor:
        """at: the indices of [k] different elements of x[None]; masks: [k] int64, the bits to flip in each."""
        new = x.detach().resolve_neg().clone()
        numbers = new.view(_INTEGERS[8 * x.element_size()]).unsqueeze(0)
        numbers[at] ^= masks.to(numbers)
        return new

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of x is that of the copy."""
        return grad, None, None
