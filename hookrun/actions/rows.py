"""Which sample and which token each row of a captured value is of, where a hook has `tokens`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenRows:
    """N rows, on the CPU.

    samples:   [N] int64, the place of each row's sample in the batch
    numbers:   [N] int64, the number of that sample: as the loop said, else counted from 0 in the order of the calls
    positions: [N] int64, counted from the sample's first real token; on attention patterns those of the queries, or
               of the keys where the hook names keys alone
    token_ids: [N] int64, the token there; -1 where it is not known
    keys:      [N] int64, the positions of the keys on attention patterns where the hook names both; else None
    """

    samples: Tensor
    numbers: Tensor
    positions: Tensor
    token_ids: Tensor
    keys: Tensor | None = None

    def at(self, rows: Tensor) -> TokenRows:
        """Some of the rows, by their places."""
        keys = None if self.keys is None else self.keys[rows]
        return TokenRows(
            self.samples[rows], self.numbers[rows], self.positions[rows], self.token_ids[rows], keys
        )
