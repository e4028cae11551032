"""Values that each sample of a batch has of its own, as actions take them from other runs."""

from __future__ import annotations

from typing import Protocol

from torch import Generator, Tensor


class Rows(Protocol):
    """Rows by sample.

    shape:  of one row
    digest: what identifies the rows, for the plan's hash
    draws:  it gives other rows at each firing
    """

    shape: tuple[int, ...]
    digest: str
    draws: bool

    def of(self, samples: Tensor, generator: Generator) -> Tensor:
        """[B, *shape] on the CPU: a row for each of the samples [B] int64.

        Raises HookrunError for a sample without a row.
        """

    def missing(self, samples: Tensor) -> Tensor:
        """Those of the samples that have no row and need one."""

    def lacks(self, samples: Tensor) -> str:
        """What to say of samples without a row."""


Source = Tensor | Rows
"""What stands for a value that comes from a file or from another run."""
