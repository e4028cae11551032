"""Several pointwise edits of one large tensor: in one compiled pass, or in parts that stay in the cache."""

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
"""(x, out): writes the edit of x into out, which may be x itself."""

SMALLEST = 1 << 20
"""Elements of the smallest tensor for which it is faster: one that does not fit into the cache."""
_PART = 1 << 19  # bytes for each of torch's threads: they fit into the cache of a core


def divisible(value: Any) -> bool:
    """Whether it is a large plain tensor on the CPU whose edits autograd does not record."""
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
        and not _is_intercepted()
        and not any(getattr(value, "names", ()))  # torch 2.10: the parts of such a tensor would lose them
        and holds_data(value)
    )


def _is_intercepted() -> bool:
    """Whether a torch mode or `torch.jit.trace` sees each operation."""
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    return modes > 0 or torch._C._is_tracing()


def in_parts(functions: Sequence[Into], x: Tensor, *, overwrite: bool = False) -> Tensor:
    """Apply the functions to x one after the other; each keeps shape and dtype. Returns the result.

    overwrite: write the result into x; else into a new tensor
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
