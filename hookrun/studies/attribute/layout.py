"""Which dimension of a layer's output holds the channels: the two that follow the size of the picture do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hookrun.engine.prove.batch import noting_calls
from hookrun.engine.prove.trial import on_a_copy
from hookrun.engine.values.containers import rebuild, tensors

FIRST = "first"
LAST = "last"
_LARGER = 64
"""The least height of the larger picture: a small map of a small one must grow."""


def output_shapes(
    model: nn.Module, example: tuple[Sequence[Any], Mapping[str, Any]], path: str
) -> list[tuple[int, ...]]:
    """The shapes of the module's first output tensor with the example (args, kwargs), and with larger pictures.

    Empty where the model cannot run in a trial; only the first where it takes pictures of one size.
    """
    found = on_a_copy(model, example, partial(_run, path), training=False)
    return [] if isinstance(found, str) else found


def found_channels(shapes: Sequence[Sequence[int]]) -> str | None:
    """`first` or `last`, if two neighbouring dimensions have grown as height and width of the picture; else None."""
    if len(shapes) != 2 or [len(shape) for shape in shapes] != [4, 4]:
        return None
    growth = [large / small for small, large in zip(*shapes, strict=True)]
    grown = [dim for dim, factor in enumerate(growth) if factor != 1]
    if grown not in ([2, 3], [1, 2]) or growth[grown[0]] >= growth[grown[1]]:
        return None
    return FIRST if grown == [2, 3] else LAST


def channels_first(
    channels: str | None, grid: tuple[int, int] | None, skip_tokens: int, value: Tensor
) -> Tensor:
    """[B, C, height, width] of a layer's output. RuntimeError if that does not have the form of the keys."""
    if channels == LAST:
        value = value.movedim(-1, 1)
    return value if grid is None else value[:, :, skip_tokens:].unflatten(2, grid)


def _run(path: str, model: nn.Module, args: Any, kwargs: Any) -> list[tuple[int, ...]]:
    module = {path: nn.Module.get_submodule(model, path)}
    shapes: list[tuple[int, ...]] = []
    with torch.no_grad():
        with noting_calls(module) as small:
            model(*args, **kwargs)
        args, kwargs = rebuild((args, kwargs), _larger)
        # what follows the module may need pictures of one size
        with suppress(Exception), noting_calls(module) as large:
            model(*args, **kwargs)
    for calls in (small, large):
        outputs = tensors([output for _, output in calls.values()])
        floats = [tensor for tensor in outputs if tensor.is_floating_point()]
        if floats:
            shapes.append(tuple(floats[0].shape))
    return shapes


def _larger(leaf: Any) -> Any:
    """A picture [B, C, height, width] several times as high and twice as many times as wide; others as they are."""
    if not isinstance(leaf, Tensor) or leaf.dim() != 4 or not leaf.is_floating_point():
        return leaf
    factor = max(2, _LARGER // leaf.shape[2])
    return leaf.repeat(1, 1, factor, 2 * factor)
