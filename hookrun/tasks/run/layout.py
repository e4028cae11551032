"""Which dimension of a layer's output holds the channels: the two that follow the size of the picture do not."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hookrun.errors import counted
from hookrun.prove.trial import Example, on_a_copy
from hookrun.values.containers import rebuild, tensors

FIRST, LAST = "first", "last"


@dataclass(frozen=True)
class Layout:
    """Where the channels and the places of a layer's output are; the fields are the keys of task=attribute."""

    channels: str | None
    grid: tuple[int, int] | None
    skip_tokens: int

    def channels_first(self, value: Tensor) -> Tensor:
        """[B, C, height, width] of the output. RuntimeError if that does not have such a form."""
        if self.channels == LAST:
            value = value.movedim(-1, 1)
        return value if self.grid is None else value[:, :, self.skip_tokens :].unflatten(2, self.grid)

    def __str__(self) -> str:
        if self.grid is None:
            return f"channels {self.channels}, the other dimensions are places"
        skipped = f" behind {counted(self.skip_tokens, 'token')}" if self.skip_tokens else ""
        return (
            f"channels {self.channels}, the tokens{skipped} are {self.grid[0]} rows of {self.grid[1]} places"
        )


_FACTORS = (2, 8, 32)
"""How much higher a picture is made, and twice as much wider, until a small map of it grows too."""


def output_shapes(model: nn.Module, example: Example, path: str) -> list[tuple[int, ...]]:
    """The shapes of the module's first output tensor: with the example, then with larger pictures until it shows.

    Empty where the model cannot run in a trial; only the first where it takes pictures of one size, or no pictures.
    """
    found = on_a_copy(model, example, partial(_run, path), training=False)
    return [] if isinstance(found, str) else found


def spatial_layout(shapes: Sequence[tuple[int, ...]]) -> str | None:
    """`first` or `last`, if two neighbouring dimensions grow as height and width of the picture; else None."""
    for shape in shapes[1:]:
        if len(shapes[0]) != 4 or len(shape) != 4:
            return None
        growth = [large / small for small, large in zip(shapes[0], shape, strict=True)]
        grown = [dim for dim, factor in enumerate(growth) if factor != 1]
        if grown in ([2, 3], [1, 2]) and growth[grown[0]] < growth[grown[1]]:
            return FIRST if grown == [2, 3] else LAST
        if len(grown) > 1:
            return None
    return None


def _run(path: str, model: nn.Module, args: Any, kwargs: Any) -> list[tuple[int, ...]]:
    shapes, seen = list[tuple[int, ...]](), list[tuple[int, ...]]()

    def see(module: nn.Module, args: Any, output: Any) -> None:
        seen.extend(tuple(tensor.shape) for tensor in tensors(output) if tensor.is_floating_point())

    handle = nn.Module.register_forward_hook(nn.Module.get_submodule(model, path), see)
    for factor in (None, *_FACTORS):
        seen.clear()
        call = (args, kwargs) if factor is None else rebuild((args, kwargs), partial(_larger, factor))
        with suppress(Exception), torch.no_grad():  # what follows the module may need pictures of one size
            model(*call[0], **call[1])
        shapes += seen[:1]
        if spatial_layout(shapes) is not None:
            break
    handle.remove()
    return shapes


def _larger(factor: int, leaf: Any) -> Any:
    """A picture [..., height, width] so many times as high and twice as many times as wide."""
    if not isinstance(leaf, Tensor) or leaf.dim() != 4 or not leaf.is_floating_point():
        return leaf
    return leaf.repeat(1, 1, factor, 2 * factor)
