"""Communication between the processes of a run, for a run of one process. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


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


def own_rank() -> int:
    """The rank of this process in a distributed run of hookrun or the user; 0 otherwise."""
    from torch import distributed

    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
