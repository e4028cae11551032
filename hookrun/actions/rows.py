"""The sample and the token of each row of a captured value, for hooks with `tokens`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenRows:
    """N rows, on the CPU.

    samples:   [N] int64, the position of each row's sample in the batch
    numbers:   [N] int64, the id of that sample: as the loop gave it, else counted from 0 in the order of the calls
    positions: [N] int64, counted from the sample's first real token; on attention patterns the positions of the
               queries, or of the keys if the hook names keys only
    token_ids: [N] int64, the token at that position; -1 if it is not known
    keys:      [N] int64, the positions of the keys on attention patterns if the hook names both; else None
    """

    samples: Tensor
    numbers: Tensor
    positions: Tensor
    token_ids: Tensor
    keys: Tensor | None = None

    def at(self, rows: Tensor) -> TokenRows:
        """A part of the rows. rows: [k] int64, their indices."""
        keys = None if self.keys is None else self.keys[rows]
        return TokenRows(
            self.samples[rows], self.numbers[rows], self.positions[rows], self.token_ids[rows], keys
        )
