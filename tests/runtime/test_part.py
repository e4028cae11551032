"""The part that an index selects is read from a tensor and written into a copy of it."""

from __future__ import annotations

import pytest
import torch

from hookrun.index import Index, Item
from hookrun.runtime.part import Part, PartOfPart

X = torch.arange(24.0).reshape(2, 3, 4)


def part(*items: Item, in_order: bool = False) -> Part:
    return Part(Index(str(items), items), in_order=in_order)


def test_writing_a_part_changes_nothing_else() -> None:
    for items in ((..., (0, -1)), (slice(None), 1), (0,), (slice(None), (2, 0), slice(1, 3))):
        of = part(*items)
        plain = tuple(list(item) if isinstance(item, tuple) else item for item in items)
        expected = X.clone()
        expected[plain] = -1.0
        before = X.clone()
        assert torch.equal(of.of(X), X[plain]), items
        assert torch.equal(of.put(X, torch.full_like(of.of(X), -1)), expected), items
        assert torch.equal(X, before)


def test_missing_repeated_and_unordered_positions_are_refused() -> None:
    for of, said in (
        (part(..., (0, 4)), "index 4 is out of bounds for dimension 2 with size 4"),
        (part(..., (1, -3)), "selects a position of dimension 2 twice"),
        (part((1, 0), in_order=True), "out of order"),
        (part(slice(2, 5)), r"selects nothing of a tensor of shape \[2, 3, 4\]"),
    ):
        with pytest.raises(IndexError, match=said):
            of.of(X)
    assert torch.equal(part((1, 0)).of(X), X.flip(0))


def test_samples_are_known_if_the_first_dimension_is_complete() -> None:
    for items, kept in (((..., 0), True), ((slice(None), 1), True), ((0,), False), (((0, 1),), False)):
        assert part(*items).keeps_samples(3) is kept, items
    assert not part(..., 0).keeps_samples(1)
    assert part(..., 0).leaves((0, 1), 3) and not part(..., 0).leaves((-1,), 3)


def test_a_part_of_a_part_is_written_through_both() -> None:
    both = PartOfPart(part(slice(None), 1), part(..., 2))
    expected = X.clone()
    expected[:, 1, 2] = 7
    assert torch.equal(both.of(X), X[:, 1, 2])
    assert torch.equal(both.put(X, torch.full((2,), 7.0)), expected)
