"""Copies of a model and of the arguments of one call, on which hooks are tried without changing the originals.

torch's fake tensors have shapes but no data, and work for any model on any device; but they import torch's compiler,
which takes as long as importing torch. Models whose modules do not depend on the device have cheaper copies: a small
model is copied with its data; a larger model is copied to the meta device, where tensors have no data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.nn.modules import module as nn_module

from hookrun.containers import rebuild, tensors

Example = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments of one call of the model."""

_SAME_ANYWHERE = (
    *(
        f"torch.nn.modules.{name}"
        for name in (
            "activation",
            "batchnorm",
            "channelshuffle",
            "container",
            "conv",
            "dropout",
            "flatten",
            "instancenorm",
            "linear",
            "normalization",
            "padding",
            "pixelshuffle",
            "pooling",
            "sparse",
            "upsampling",
        )
    ),
    "torchvision.models",
    "torchvision.ops.misc",
    "torchvision.ops.stochastic_depth",
    "hookrun.models",
)
"""Packages whose modules compute the same shapes, by the same calls, on every device."""


_SMALL_MODEL, _SMALL_EXAMPLE = 2**20, 2**14
"""The most elements of all parameters and buffers, and of all arguments, for a copy with data: a few milliseconds."""


@dataclass(frozen=True)
class TrialCopy:
    """A copy of a model and of the arguments of one call.

    inside: returns the context manager in which the copy runs
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inside: Callable[[], AbstractContextManager[Any]]


def fake_copy(model: nn.Module, example: Example) -> TrialCopy:
    """A copy with fake tensors, for any model. The originals are not changed."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        made = copy.deepcopy(model)
    with mode:
        args, kwargs = rebuild(_plain(example), lambda leaf: _if_tensor(leaf, mode.from_tensor))
    return TrialCopy(made, args, kwargs, lambda: mode)


def quick_copy(model: nn.Module, example: Example, *, may_compute: bool) -> TrialCopy | None:
    """A copy that needs no compiler; None where it might behave differently. The originals are not changed.

    may_compute: whether the copy may have tensors with data
    """
    held, given = [*model.parameters(), *model.buffers()], list(tensors(_plain(example)))
    if not _computes_the_same(model) or not all(map(_is_ordinary, [*held, *given])):
        return None
    if may_compute and _elements(held) <= _SMALL_MODEL and _elements(given) <= _SMALL_EXAMPLE:
        memo, change = {}, _as_it_is
    else:
        memo, change = {id(tensor): _on_meta(tensor) for tensor in held}, _on_meta
    args, kwargs = rebuild(_plain(example), lambda leaf: _if_tensor(leaf, change))
    return TrialCopy(copy.deepcopy(model, memo), args, kwargs, nullcontext)


def _elements(found: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in found)


def _plain(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = example
    return tuple(args), dict(kwargs)


def _if_tensor(leaf: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return change(leaf) if isinstance(leaf, Tensor) else leaf


def _computes_the_same(model: nn.Module) -> bool:
    """Whether every module is of a known class, with the forward of its class and without hooks."""
    hooked = any(
        getattr(nn_module, name)
        for name in vars(nn_module)
        if name.startswith("_global_") and "hooks" in name
    )
    return not hooked and all(map(_is_known, model.modules()))


def _is_known(module: nn.Module) -> bool:
    home = type(module).__module__
    if not any(home == each or home.startswith(f"{each}.") for each in _SAME_ANYWHERE):
        return False
    if isinstance(module, nn.MultiheadAttention):  # its computation depends on the device
        return False
    own = vars(module)
    return (
        "forward" not in own
        and not any(own.get(name) for name in own if name.endswith("_hooks"))
        and all(_is_setting(value) for name, value in own.items() if name not in _OF_EVERY_MODULE)
    )


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""The attributes that every module has: parameters, buffers, modules, hooks and mode."""


def _is_setting(value: Any) -> bool:
    """Whether the value is a setting such as a size, a mode or a name, which is cheap and safe to copy."""
    if isinstance(value, tuple | list | set | frozenset):
        return all(map(_is_setting, value))
    if isinstance(value, dict):
        return all(_is_setting(each) for item in value.items() for each in item)
    if isinstance(value, partial):
        return _is_setting((value.args, value.keywords))
    if is_dataclass(value) and not isinstance(value, type):
        return _is_setting(vars(value))
    return value is None or isinstance(value, _SETTINGS)


_SETTINGS = (
    bool,
    int,
    float,
    str,
    type,
    Enum,
    FunctionType,
    BuiltinFunctionType,
    torch.dtype,
    torch.device,
)


def _is_ordinary(tensor: Tensor) -> bool:
    """Whether a meta tensor with the same shape, strides and dtype can replace the tensor."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.grad_fn is None
        and not tensor.is_quantized
        and not tensor._is_view()
    )


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _on_meta(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)
