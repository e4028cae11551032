"""The processes of a distributed run: communication for a run of one, and which one torchrun started; no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hookrun.errors import spec_error

if TYPE_CHECKING:
    from torch import Tensor


WHERE = "compute.strategy"


class Ranks:
    """The processes of a run. This base class is for one process and communicates nothing.

    rank:    rank of this process, from 0
    size:    number of processes
    several: whether there are several processes, so that gradients and sums have to be reduced
    """

    rank = 0
    size = 1
    several = False

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes the run directory."""
        return self.rank == 0

    def total(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over all ranks, in float64."""
        return list(values)

    def largest(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over all ranks."""
        return list(values)

    def gathered(self, plain: Any) -> list[Any]:
        """The values of all ranks, in the order of the ranks.

        plain: numbers, texts, None, tensors, and lists and dicts of these
        """
        return [plain]

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Add the tensors of all ranks, in place."""

    def from_main(self, tensors: Sequence[Tensor]) -> None:
        """Copy the content of rank 0's tensors into these, in place."""

    def failures_told(self) -> AbstractContextManager[None]:
        """A context: its failure is sent to the other ranks, and a failure of another rank is raised in it."""
        return nullcontext()

    def meet(self) -> None:
        """Wait until every rank has called this (a barrier)."""


ALONE = Ranks()


def share(count: int, rank: int, size: int) -> range:
    """A rank's part of `count` things: contiguous; the first ranks take any remaining ones."""
    least, more = divmod(count, size)
    start = rank * least + min(rank, more)
    return range(start, start + least + (rank < more))


@dataclass(frozen=True)
class Started:
    """The position of this process in a run of several.

    rank:  its rank, from 0
    size:  number of processes
    local: its rank among the processes of its machine, which selects its accelerator
    """

    rank: int
    size: int
    local: int


def started() -> Started | None:
    """The rank from torchrun's environment variables; None if torchrun did not start this process.

    Raises SpecError if the environment names several processes but not the rank of this one.
    """
    size = _number("WORLD_SIZE")
    if size is None:
        return None
    rank, local = _number("RANK"), _number("LOCAL_RANK")
    if rank is None and size > 1:
        raise spec_error(
            WHERE,
            f"the environment names {size} processes (WORLD_SIZE) and no rank of this one (RANK)",
            "start it by torchrun, which sets both",
        )
    if rank is None or not os.environ.get("MASTER_ADDR"):
        return None
    return Started(rank, size, rank if local is None else local)


def size_of_world() -> int:
    """The number of processes according to the environment; 1 without torchrun."""
    return _number("WORLD_SIZE") or 1


def is_main() -> bool:
    """Whether this process prints: it is the only one, or rank 0."""
    return not _number("RANK") or size_of_world() == 1


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else None
