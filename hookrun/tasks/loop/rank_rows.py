"""Splits each batch over the ranks: all ranks see the same order of batches, and each row is loaded by one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hookrun.containers import rebuild


def share(count: int, rank: int, size: int) -> range:
    """The indices of a rank's rows in a batch of `count` rows: contiguous; the first ranks take any remaining rows."""
    least, more = divmod(count, size)
    start = rank * least + min(rank, more)
    return range(start, start + least + (rank < more))


def rows_of_rank(batch: Sequence[int], rank: int, size: int) -> list[int]:
    """The sample numbers of the rows of a batch that this rank loads.

    A rank without rows loads the first row of the batch as a pattern of its shape. The number `n` of this row is given
    as `~n`, and `without_rows` removes the row.
    """
    return [batch[place] for place in share(len(batch), rank, size)] or [~batch[0]]


def without_rows(ids: Tensor, inputs: Any, target: Any) -> tuple[Tensor, Any, Any]:
    """A batch without rows, with the structure, dtypes and other dimensions of the given one."""

    def nothing(leaf: Any) -> Any:
        return leaf[:0] if isinstance(leaf, Tensor) else leaf

    return ids[:0], rebuild(inputs, nothing), rebuild(target, nothing)
