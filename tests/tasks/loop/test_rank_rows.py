"""The ranks divide each batch: every row is loaded once, and a rank without rows has a placeholder of the same form."""

from __future__ import annotations

import torch

from hookrun.tasks.loop.rank_rows import rows_of_rank, share, without_rows


def test_the_shares_of_all_ranks_are_the_batch() -> None:
    for count in range(9):
        for size in (1, 2, 3, 5):
            shares = [share(count, rank, size) for rank in range(size)]
            assert [place for each in shares for place in each] == list(range(count)), (count, size)
            assert max(map(len, shares)) - min(map(len, shares)) <= 1, (count, size)


def test_a_rank_without_rows_loads_a_marked_placeholder() -> None:
    batches = [[0, 1, 2], [3, 4, 5], [6]]
    loaded = [[rows_of_rank(batch, rank, 2) for batch in batches] for rank in range(2)]
    assert loaded == [[[0, 1], [3, 4], [6]], [[2], [5], [~6]]]


def test_an_empty_batch_keeps_its_structure() -> None:
    ids, inputs, target = without_rows(torch.tensor([~6]), {"x": torch.ones(1, 4), "k": 2}, torch.ones(1))
    assert (ids.shape, inputs["x"].shape, inputs["k"], target.shape) == ((0,), (0, 4), 2, (0,))
