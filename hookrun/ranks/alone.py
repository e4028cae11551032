"""What the processes of a run tell each other; one process alone has nobody to tell. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class Ranks:
    """The processes of a run. This base is the run of one process, which needs to tell nobody anything.

    rank:    of this process, from 0
    size:    how many there are
    several: whether gradients and sums are those of several processes
    """

    rank = 0
    size = 1
    several = False

    @property
    def is_main(self) -> bool:
        """Whether this process owns the screen and the run directory."""
        return self.rank == 0

    def total(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over all ranks, in float64."""
        return list(values)

    def largest(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over all ranks."""
        return list(values)

    def gathered(self, plain: Any) -> list[Any]:
        """What each rank gave, in the order of the ranks: plain values, as JSON holds them."""
        return [plain]

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Add the tensors of all ranks, in place."""

    def from_main(self, tensors: Sequence[Tensor]) -> None:
        """Take the content of rank 0's tensors, in place."""

    def failures_told(self) -> AbstractContextManager[None]:
        """A block whose failure the other ranks are told of, and in which that of another rank is raised."""
        return nullcontext()

    def meet(self) -> None:
        """Wait until every rank is here."""


ALONE = Ranks()


def own_rank() -> int:
    """Of this process in a distributed run, hookrun's or a user's own; 0 in any other."""
    from torch import distributed

    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
