"""A split is a partition of the right size, the same on every machine and in every version."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from hookrun.data.split import split_indices, stratified_indices, val_count

FRACTIONS = st.floats(0, 1)
STRICT_FRACTIONS = st.floats(0, 1, exclude_min=True, exclude_max=True)


@given(st.integers(0, 300), FRACTIONS)
def test_the_parts_are_disjoint_and_complete(total: int, fraction: float) -> None:
    train, val = split_indices(total, fraction)
    assert sorted(train + val) == list(range(total))
    assert train == sorted(train)
    assert val == sorted(val)
    assert len(val) == val_count(total, fraction)


@given(st.integers(0, 300), FRACTIONS)
def test_the_validation_part_is_the_fraction_to_within_one_sample(total: int, fraction: float) -> None:
    assert abs(val_count(total, fraction) - total * fraction) <= 1


@given(st.integers(2, 300), STRICT_FRACTIONS)
def test_neither_part_is_empty_unless_requested(total: int, fraction: float) -> None:
    assert 0 < val_count(total, fraction) < total


def test_a_fraction_of_0_or_1_gives_one_empty_part() -> None:
    assert split_indices(3, 0) == ([0, 1, 2], [])
    assert split_indices(3, 1) == ([], [0, 1, 2])


@given(st.lists(st.integers(0, 4), max_size=100), FRACTIONS)
def test_a_stratified_split_takes_the_fraction_of_each_class(labels: list[int], fraction: float) -> None:
    train, val = stratified_indices(labels, fraction)
    assert sorted(train + val) == list(range(len(labels)))
    held_out = Counter(labels[i] for i in val)
    assert held_out == {
        label: n for label, total in Counter(labels).items() if (n := val_count(total, fraction))
    }


def test_the_split_has_the_recorded_indices() -> None:
    assert split_indices(12, 0.25)[1] == [4, 6, 11]
