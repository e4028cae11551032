"""Which rows of each batch a rank loads: the ranks split the same ordered batches, and no row is loaded twice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import Sampler

from hookrun.containers import rebuild


def share(count: int, rank: int, size: int) -> range:
    """The places of a rank's rows in a batch of `count`: neighbours, the first ranks with one more where it is odd."""
    least, more = divmod(count, size)
    start = rank * least + min(rank, more)
    return range(start, start + least + (rank < more))


class RankRows(Sampler[list[int]]):
    """The rank's rows of each batch of an order.

    A rank without rows loads the first row of the batch as a pattern, whose number stands as its complement (`~n`),
    and which `without_rows` takes away again.
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
    """A batch of no rows, in the form of another."""

    def nothing(leaf: Any) -> Any:
        return leaf[:0] if isinstance(leaf, Tensor) else leaf

    return ids[:0], rebuild(inputs, nothing), rebuild(target, nothing)
