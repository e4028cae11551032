"""A rank draws the same random numbers for its rows as one process does."""

from __future__ import annotations

import pytest
import torch
from torch import Generator, Tensor

from hookrun.runtime.clock import RowsOfRank
from hookrun.runtime.drawn import drawn


def normal(x: Tensor, generator: Generator) -> Tensor:
    return x.normal_(generator=generator)


def of_rows(like: Tensor, rows: RowsOfRank | None) -> Tensor:
    return drawn(like, normal, Generator().manual_seed(1), rows)


def test_the_numbers_of_all_ranks_are_those_of_one_process() -> None:
    channels_last = torch.empty(5, 3, 2, 2).to(memory_format=torch.channels_last)
    for like in (torch.empty(5, 3), torch.empty(5), channels_last):
        alone = of_rows(like, None)
        shares = [
            of_rows(like[mine.start : mine.stop], RowsOfRank(mine, 5)) for mine in (range(2), range(2, 5))
        ]
        assert torch.equal(torch.cat(shares), alone), like.shape


def test_a_tensor_without_the_batch_s_rows_is_refused() -> None:
    for like in (torch.empty(3, 2), torch.empty(())):
        with pytest.raises(ValueError, match="this rank has 2 rows"):
            of_rows(like, RowsOfRank(range(2), 5))
