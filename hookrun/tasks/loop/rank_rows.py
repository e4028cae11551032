"""Splits each batch over the ranks: all ranks see the same order of batches, and each row is loaded by one rank."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import Sampler

from hookrun.containers import rebuild


def share(count: int, rank: int, size: int) -> range:
    """The indices of a rank's rows in a batch of `count` rows: contiguous; the first ranks take any remaining rows."""
    least, more = divmod(count, size)
    start = rank * least + min(rank, more)
    return range(start, start + least + (rank < more))


class RankRows(Sampler[list[int]]):
    """Samples this rank's rows of each batch, as lists of sample numbers.

    A rank without rows loads the first row of the batch as a pattern of its shape. The number `n` of this row is given
    as `~n`, and `without_rows` removes the row.
    """

    def __init__(self, order: Sampler[int], batch_size: int, rank: int, size: int) -> None:
        self._order, self._batch_size = order, batch_size
        self._rank, self._size = rank, size

    def __iter__(self) -> Iterator[list[int]]:
        rest = iter(self._order)
        while batch := list(islice(rest, self._batch_size)):
            places = share(len(batch), self._rank, self._size)
            yield [batch[place] for place in places] or [~batch[0]]

    def __len__(self) -> int:
        return -(-len(self._order) // self._batch_size)  # type: ignore[arg-type]


def without_rows(ids: Tensor, inputs: Any, target: Any) -> tuple[Tensor, Any, Any]:
    """A batch without rows, with the structure, dtypes and other dimensions of the given one."""

    def nothing(leaf: Any) -> Any:
        return leaf[:0] if isinstance(leaf, Tensor) else leaf

    return ids[:0], rebuild(inputs, nothing), rebuild(target, nothing)
