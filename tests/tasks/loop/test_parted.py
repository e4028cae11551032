"""Sums of metrics by position and by sample: each value once, under its own key, for any division into batches."""

from __future__ import annotations

import pytest
import torch

from hookrun.tasks.loop import parted
from hookrun.tasks.loop.parted import PartAccumulator, PartSums, by_position, by_sample


def rows(sums: PartSums) -> list[tuple[int, float, int]]:
    return list(zip(sums.keys.tolist(), sums.sums.tolist(), sums.counts.tolist(), strict=True))


def test_values_are_summed_in_float64_under_their_position_and_the_number_of_their_sample() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 2.0**-30], requires_grad=True)
    assert rows(by_position(values, torch.tensor([3, 0, 3, 0]))) == [(0, 2 + 2.0**-30, 2), (3, 5.0, 2)]
    ids = torch.tensor([70, 50])
    assert rows(by_sample(values, torch.tensor([1, 0, 1, 1]), ids)) == [(70, 2.0, 1), (50, 5 + 2.0**-30, 3)]


def test_batches_add_up_with_each_key_once_however_many_are_kept_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for most in (4096, 2):
        monkeypatch.setattr(parted, "_MOST_SEPARATE", most)
        one, other = PartAccumulator(), PartAccumulator()
        for number in range(5):
            one.add(by_position(torch.tensor([1.0, 10.0]), torch.tensor([9, number])))
        other.add(by_position(torch.tensor([100.0]), torch.tensor([2])))
        one.include(other)
        assert rows(one.whole()) == [
            (0, 10.0, 1), (1, 10.0, 1), (2, 110.0, 2), (3, 10.0, 1), (4, 10.0, 1), (9, 5.0, 5)
        ], most  # fmt: skip


def test_saved_sums_continue_to_the_same_bits_and_empty_ones_too() -> None:
    torch.manual_seed(0)
    straight, saved = PartAccumulator(), PartAccumulator()
    for number in range(6):
        batch = by_position(torch.randn(50) * 1e6, torch.randint(0, 7, (50,)))
        straight.add(batch)
        saved.add(batch)
        if number in (1, 3):
            state, saved = saved.state_dict(), PartAccumulator()
            saved.load_state_dict(state)
    assert rows(saved.whole()) == rows(straight.whole())
    empty = PartAccumulator()
    empty.load_state_dict(PartAccumulator().state_dict())
    assert rows(empty.whole()) == []
