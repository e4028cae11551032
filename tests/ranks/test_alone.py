"""A run of one process does not communicate: its sums are its own values."""

from __future__ import annotations

import torch

from hookrun.ranks.alone import ALONE, own_rank


def test_one_process_is_the_main_one_and_keeps_its_values() -> None:
    tensor = torch.tensor([1.0, 2.0])
    ALONE.sum_([tensor])
    ALONE.from_main([tensor])
    ALONE.meet()
    assert ALONE.is_main and not ALONE.several and (ALONE.rank, ALONE.size) == (0, 1)
    assert ALONE.total([1.5, 2]) == [1.5, 2] and ALONE.largest([3]) == [3]
    assert ALONE.gathered({"a": 1}) == [{"a": 1}]
    assert tensor.tolist() == [1, 2]
    assert own_rank() == 0
