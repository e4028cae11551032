"""A part of the rows of a captured value keeps all columns of each row."""

from __future__ import annotations

import torch

from hookrun.actions.rows import TokenRows


def test_a_part_of_the_rows_has_all_their_columns() -> None:
    columns = [torch.arange(start, start + 3) for start in (0, 10, 20, 30, 40)]
    picked = torch.tensor([2, 0])
    part = TokenRows(*columns).at(picked)
    for name, column in zip(TokenRows.__slots__, columns, strict=True):
        assert torch.equal(getattr(part, name), column[picked]), name
    assert TokenRows(*columns[:4]).at(picked).keys is None
