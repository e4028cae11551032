"""Several pointwise edits of one large tensor, part by part: what lies between them stays in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hookrun.actions.tensors import holds_data
from hookrun.tensor_copies import functorch_level

SMALLEST = 1 << 20
"""Elements of a tensor for which it pays: one that does not stay in the cache."""
_PART = 1 << 15  # elements: as many as torch leaves to one thread, since waiting for others would cost more
_MOST_THREADS = 4  # more of them are faster one edit after the other


def divisible(value: Any) -> bool:
    """Whether it is a large plain tensor on the CPU whose edits nobody differentiates."""
    return (
        type(value) is Tensor
        and value.is_cpu
        and value.numel() >= SMALLEST
        and value.is_floating_point()
        and not (value.requires_grad and torch.is_grad_enabled())
        and value.layout is torch.strided
        and not value.is_nested
        and value.is_contiguous()
        and torch.get_num_threads() <= _MOST_THREADS
        and functorch_level() is None
        and forward_ad._current_level < 0
        and holds_data(value)
    )


def in_parts(functions: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    """A new tensor: the functions one after the other, each of which keeps the shape and dtype of what it is given."""
    new = torch.empty_like(x)
    for part, place in zip(x.view(-1).split(_PART), new.view(-1).split(_PART), strict=True):
        for function in functions:
            part = function(part)
        place.copy_(part)
    return new
