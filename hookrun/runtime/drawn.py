"""Random numbers for a tensor; each row gets the same numbers on whichever rank it is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor
from torch._prims_common import suggest_memory_format

from hookrun.runtime.clock import RowsOfRank

Fill = Callable[[Tensor, Generator], Tensor]
"""Fills a tensor in place from a generator, and returns it."""


def drawn(like: Tensor, fill: Fill, generator: Generator, rows: RowsOfRank | None) -> Tensor:
    """A tensor of the shape, dtype and device of `like`, filled from the generator.

    rows: which rows of the batch `like` has. Numbers are drawn for all rows of the batch, as in a single process, and
          this rank's rows are returned, so that a sample's numbers do not depend on the number of ranks. None: `like`
          has the whole batch

    Raises ValueError if the number of rows of `like` is another one.
    """
    if rows is None:
        return fill(torch.empty_like(like), generator)
    if not like.dim() or len(like) != len(rows.mine):
        shape = list(like.shape)
        raise ValueError(f"this rank has {len(rows.mine)} rows of the batch, the tensor has shape {shape}")
    sizes, form = (rows.whole, *like.shape[1:]), suggest_memory_format(like)
    whole = fill(torch.empty(sizes, dtype=like.dtype, device=like.device, memory_format=form), generator)
    return whole[rows.mine.start : rows.mine.stop]
