"""What several actions share: whether a value broadcasts, whether a tensor holds data, tensors that are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, dtype


def broadcasts(shape: Sequence[int], onto: Sequence[int]) -> bool:
    """Whether a value of `shape` broadcasts to the shape `onto`, with `onto` as the result."""
    extra = len(onto) - len(shape)
    return extra >= 0 and all(size in (1, wide) for size, wide in zip(shape, onto[extra:], strict=True))


def check_broadcast(value: Tensor, x: Tensor) -> None:
    """ValueError naming both shapes if adding `value` to `x` would change the shape of `x`, or is impossible."""
    shape, onto = value.shape, x.shape
    # One comparison settles the usual case, a vector over the last dimension: this runs at every firing.
    if shape != onto[len(onto) - len(shape) :] and not broadcasts(shape, onto):
        raise ValueError(broadcast_error(shape, onto))


def broadcast_error(shape: Sequence[int], onto: Sequence[int]) -> str:
    """Error text for a value of `shape` that does not broadcast to `onto`, and how to nest a list by channel."""
    shape = tuple(shape)
    text = f"the value has shape {list(shape)}, which does not broadcast to the tensor's shape {list(onto)}"
    dims = [dim for dim, size in enumerate(onto[:-1]) if dim and shape == (size,)]
    if len(dims) != 1:  # a list of numbers for one dimension that is not the last, as a channel is
        return text
    nested = [shape[0], *[1] * (len(onto) - dims[0] - 1)]
    example = "[" * len(nested) + "a" + "]" * (len(nested) - 1) + ", " + "[" * (len(nested) - 1)
    return f"{text}: to give one number per index of dimension {dims[0]}, nest the list to shape {nested}: {example}b…"


def scalars(value: float) -> Mapping[dtype, Tensor]:
    """dtype -> the number as a tensor [], for the dtypes in which that is a faster operand than a Python float.

    On small CPU tensors it takes 1.3 instead of 3.0 µs; an accelerator takes a CPU scalar without waiting. Half
    precision is left out, because the number would be rounded before the operation.
    """
    import torch

    exact = (torch.float32, torch.float64)
    return {dtype: torch.tensor(value, dtype=dtype, device="cpu") for dtype in exact}


def nearest_finite(bound: float) -> Mapping[dtype, float]:
    """Floating-point dtype -> the bound, or the finite number of the dtype nearest to it."""
    import torch

    tops = {
        dtype: torch.finfo(dtype).max
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    }
    return {dtype: max(-top, min(bound, top)) for dtype, top in tops.items()}


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Tensors made inside the block can be used in training later, also if it is run under inference mode."""
    import torch

    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


def require_whole(x: Tensor) -> None:
    """ValueError for a DTensor, of which this rank holds only a part."""
    if type(x).__name__ == "DTensor":
        raise ValueError(
            "the tensor is sharded over several ranks (DTensor): take its own part, x.to_local(), or the whole, "
            "x.full_tensor(), in a module that can be hooked"
        )


def holds_data(x: Tensor) -> bool:
    """Whether the tensor has elements that can be read, now and later.

    A fake or meta tensor has a shape and a dtype only. Tensors inside a trace (`torch.export`, functionalization) or a
    transform of `torch.func` stand for other tensors and must not be kept.
    """
    if x.is_meta:
        return False
    plain, is_wrapped, is_functional, is_fake = _guards()
    if is_wrapped(x) or is_functional(x):
        return False
    return type(x) is plain or not is_fake(x)


@cache
def _guards() -> tuple[type, Callable[..., bool], Callable[..., bool], Callable[..., bool]]:
    import torch
    from torch._C._functorch import is_functorch_wrapped_tensor
    from torch._subclasses.fake_tensor import is_fake

    return torch.Tensor, is_functorch_wrapped_tensor, torch._is_functional_tensor, is_fake
