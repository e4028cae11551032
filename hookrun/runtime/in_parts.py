"""Several pointwise edits of one large tensor: one compiled pass, or part by part, so that it stays in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hookrun.actions.tensors import holds_data
from hookrun.kernels.edits import edited
from hookrun.tensor_copies import functorch_level

Into = Callable[[Tensor, Tensor], object]
"""(x, out): what the edit makes of x is written into out, which may be x."""

SMALLEST = 1 << 20
"""Elements of a tensor for which it pays: one that does not stay in the cache."""
_PART = 1 << 19  # bytes for each of torch's threads: they stay in its core's cache from edit to edit


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
        and functorch_level() is None
        and forward_ad._current_level < 0
        and not _is_followed()
        and not any(getattr(value, "names", ()))  # torch 2.10: the parts of such a tensor would lose them
        and holds_data(value)
    )


def _is_followed() -> bool:
    """Whether each operation of torch is seen by a mode, or recorded by `torch.jit.trace`."""
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    return modes > 0 or torch._C._is_tracing()


def in_parts(functions: Sequence[Into], x: Tensor, *, overwrite: bool = False) -> Tensor:
    """The functions one after the other, each of which keeps the shape and dtype of what it is given.

    overwrite: into x itself, which is returned; else into a new tensor
    """
    new = x if overwrite else torch.empty_like(x)
    if edited(functions, x, new):
        return new
    size = _PART * torch.get_num_threads() // x.element_size()
    with torch.no_grad():
        for part, place in zip(x.view(-1).split(size), new.view(-1).split(size), strict=True):
            for function in functions:
                function(part, place)
                part = place
    return new
