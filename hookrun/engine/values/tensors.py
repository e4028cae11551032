"""What several actions share: whether a value broadcasts, whether a tensor holds data, tensors that are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, device, dtype


def elements(x: Tensor) -> Tensor:
    """The elements of all parts of a nested tensor, in one dimension; any other tensor as it is."""
    if not x.is_nested:
        return x
    import torch

    none = torch.empty(0, dtype=x.dtype, device=x.device)
    return torch.cat([none, *(part.reshape(-1) for part in x.detach().unbind())])


def shape_of(x: Tensor) -> list[int | None]:
    """The shape; None for a dimension in which the parts of a nested tensor differ."""
    if not has_no_shape(x):
        return [size if isinstance(size, int) else None for size in x.shape]
    shapes = shapes_of(x)
    shape: list[int | None] = [len(shapes)]
    for sizes in zip(*shapes, strict=True):
        shape.append(sizes[0] if len(set(sizes)) == 1 else None)
    return shape


def shapes_of(x: Tensor) -> Sequence[Any]:
    """The shape; for a nested tensor of strided layout, which has none, a list of the shapes of its parts."""
    return [part.shape for part in x.detach().unbind()] if has_no_shape(x) else x.shape


def has_no_shape(x: Tensor) -> bool:
    """Whether it is a nested tensor of strided layout."""
    if not x.is_nested:
        return False
    import torch

    return x.layout is torch.strided


def whole_numbers(given: Any) -> Tensor | None:
    """An int, a sequence or a tensor of whole numbers as an int64 tensor on the CPU; None for anything else."""
    import torch

    try:
        numbers = torch.as_tensor(given, device="cpu")
    except (RuntimeError, TypeError, ValueError):
        return None
    is_other = numbers.is_floating_point() or numbers.is_complex() or numbers.dtype is torch.bool
    # an empty list is a float tensor
    return None if is_other and numbers.numel() else numbers.to(torch.int64)


def broadcasts(shape: Sequence[int], onto: Sequence[int]) -> bool:
    """Whether a value of `shape` broadcasts to the shape `onto`, with `onto` as the result."""
    extra = len(onto) - len(shape)
    return extra >= 0 and all(size in (1, wide) for size, wide in zip(shape, onto[extra:], strict=True))


def check_broadcast(value: Tensor, x: Tensor, hint: str = "") -> None:
    """ValueError naming both shapes if adding `value` to `x` would change the shape of `x`, or is impossible.

    hint: what the message ends with
    """
    shape = value.shape
    onto = x.shape
    # One comparison settles the usual case, a vector over the last dimension: this runs at every firing.
    if shape != onto[len(onto) - len(shape) :] and not broadcasts(shape, onto):
        raise ValueError(broadcast_error(shape, onto) + hint)


def broadcast_error(shape: Sequence[int], onto: Sequence[int]) -> str:
    """Error text for a value of `shape` that does not broadcast to `onto`, and how to nest a list by channel."""
    shape = tuple(shape)
    text = f"the value has shape {list(shape)}, which does not broadcast to the tensor's shape {list(onto)}"
    dims = [dim for dim, size in enumerate(onto[:-1]) if dim and shape == (size,)]
    if len(dims) != 1:  # a list of numbers for one dimension that is not the last, as a channel is
        return text
    inner = len(onto) - dims[0] - 1
    nested = [shape[0], *[1] * inner]
    opened = "[" * inner
    closed = "]" * inner
    return (
        f"{text}: to give one number per index of dimension {dims[0]}, nest the list to shape {nested}: "
        f"[{opened}a{closed}, {opened}b…"
    )


def scalars(value: float) -> Mapping[dtype, Tensor]:
    """dtype -> the number as a tensor [], for the dtypes in which that is a faster operand than a Python float.

    On small CPU tensors it takes 1.3 instead of 3.0 µs; an accelerator takes a CPU scalar without waiting. Half
    precision is left out, because the number would be rounded before the operation.
    """
    import torch

    return {dtype: torch.tensor(value, dtype=dtype, device="cpu") for dtype in (torch.float32, torch.float64)}


def nearest_finite(bound: float) -> Mapping[dtype, float]:
    """Floating-point dtype -> the bound, or the finite number of the dtype nearest to it."""
    import torch

    of_8_bits = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    tops = {
        dtype: torch.finfo(dtype).max
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, *of_8_bits)
    }
    return {dtype: max(-top, min(bound, top)) for dtype, top in tops.items()}


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Tensors made inside the block can be used in training later, also if it is run under inference mode."""
    import torch

    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


def as_real(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The elements as real numbers (complex ones [...] as [..., 2]), without conjugate and negative bits; the inverse.

    The inverse also takes the numbers in another dtype; ValueError if there are no complex numbers with such parts.
    """
    import torch

    if not x.is_complex():
        return x.resolve_neg(), lambda real: real

    def as_complex(real: Tensor) -> Tensor:
        if real.dtype not in (torch.float16, torch.float32, torch.float64):
            raise ValueError(f"no complex tensor has parts in {real.dtype}: use float16, float32 or float64")
        return torch.view_as_complex(real)

    return torch.view_as_real(x.resolve_conj().resolve_neg()), as_complex


def require_real(x: Tensor) -> None:
    """ValueError for a complex tensor, for which an action has no meaning."""
    if x.is_complex():
        raise ValueError(
            f"the tensor is complex ({str(x.dtype).removeprefix('torch.')}), and the action takes real ones: "
            "hook the module that makes its real and imaginary parts"
        )


def computable(tensor: Tensor) -> Tensor:
    """The tensor as float32 if its dtype is smaller, else unchanged."""
    import torch

    if tensor.dtype is torch.float32 or is_float8(tensor):
        return tensor.float()
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def in_numpy(x: Tensor) -> NDArray[Any]:
    """The numbers of a tensor on the CPU; those of fewer than 32 bits as float32, since NumPy lacks some of them."""
    wide = x.float() if x.itemsize < 4 else x
    return wide.numpy(force=True)  # without a negative bit


def widened(x: Tensor) -> Tensor:
    """A float8 tensor as float32, any other as it is."""
    return x.float() if is_float8(x) else x


def is_integer(x: Tensor) -> bool:
    """Whether its elements are integers or booleans; those of a quantized tensor stand for others."""
    return not (x.is_floating_point() or x.is_complex() or x.is_quantized)


def is_float8(x: Tensor) -> bool:
    """Whether its floating-point numbers have 8 bits: torch converts them, but does not compute with them."""
    return x.itemsize == 1 and x.is_floating_point()


def in_form_of(source: Tensor, like: Tensor) -> Tensor:
    """The value in dtype and on device of a tensor. ValueError if it is complex and the tensor is real."""
    if source.is_complex() and not like.is_complex():
        raise ValueError(
            "the value is complex and the tensor is real: give its real part or its absolute value"
        )
    return source.to(device=like.device, dtype=like.dtype)


def on_device(x: Tensor, where: device) -> Tensor:
    """The tensor on a device; from the CPU it is copied through pinned memory, and the host does not wait."""
    if x.device == where:
        return x
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    if torch.compiler.is_compiling() or not (x.is_cpu and holds_data(x) and pins(where.type)):
        return x.to(where)
    # no fake tensor can be pinned, and in a trial run this one would become one
    with unset_fake_temporarily():
        pinned = x.pin_memory()
    return pinned.to(where, non_blocking=True)


@cache
def pins(kind: str) -> bool:
    """Whether memory of the CPU can be pinned for devices of this type, so that the host does not wait for copies."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != kind or kind == "mps":  # mps has the memory of the CPU
        return False
    try:
        with unset_fake_temporarily():
            torch.empty(1, device="cpu", pin_memory=True)
    except RuntimeError:
        return False
    return True


def read_together(given: Iterable[Tensor]) -> list[Tensor]:
    """The tensors, detached, in the CPU's memory; the host waits once for each device, not for each tensor."""
    detached = [x.detach() for x in given]
    # nothing waits for an empty copy
    last = {x.device: number for number, x in enumerate(detached) if x.numel()}
    # a device copies in order: when its last copy has arrived, all have
    return [x.to("cpu", non_blocking=number != last.get(x.device)) for number, x in enumerate(detached)]


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
