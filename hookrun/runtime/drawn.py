"""Random numbers for a tensor: those of its rows, whichever rank has them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor
from torch._prims_common import suggest_memory_format

from hookrun.runtime.clock import RowsOfRank

Fill = Callable[[Tensor, Generator], Tensor]
"""Fills a tensor in place from a generator, and returns it."""


def drawn(like: Tensor, fill: Fill, generator: Generator, rows: RowsOfRank | None) -> Tensor:
    """A tensor in the form of `like`, filled from the generator.

    rows:  of the batch, which `like` has; the numbers of all its rows are drawn as one process draws them, and this
           rank's are taken: what a sample is given does not depend on the number of ranks. None: all are there

    Raises ValueError for a tensor that does not have the batch's rows.
    """
    if rows is None:
        return fill(torch.empty_like(like), generator)
    if not like.dim() or len(like) != len(rows.mine):
        shape = list(like.shape)
        raise ValueError(f"this rank has {len(rows.mine)} rows of the batch, the tensor has shape {shape}")
    sizes, form = (rows.whole, *like.shape[1:]), suggest_memory_format(like)
    whole = fill(torch.empty(sizes, dtype=like.dtype, device=like.device, memory_format=form), generator)
    return whole[rows.mine.start : rows.mine.stop]
