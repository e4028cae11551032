"""What kinds of data sets share: root folders, splits that never change, samples that are generated."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hookrun.data.fake_images import FakeImages
from hookrun.data.source import (
    require_root,
    split_indices,
    stratified_indices,
    val_count,
)
from hookrun.errors import Problem, SpecError


def test_an_existing_folder_is_returned(tmp_path: Path) -> None:
    assert require_root("digits", tmp_path, "") == tmp_path


def test_a_missing_root_argument_is_an_error() -> None:
    with pytest.raises(SpecError) as caught:
        require_root("mnist", None, "download it")
    assert caught.value.errors == [
        Problem("data.root", "the data set 'mnist' is read from a folder, and none is given", "download it")
    ]


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_path_that_is_not_a_folder_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpecError) as caught:
        require_root("mnist", tmp_path / name, "download it")
    (problem,) = caught.value.errors
    assert str(tmp_path / name) in problem.what
    assert problem.hint == "download it"


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


def test_the_numbers_drawn_depend_on_seed_split_and_sample() -> None:
    own, follows = FakeImages(seed=5), FakeImages(seed=None)
    first, same, other, of_experiment = (
        torch.rand(4, generator=images.generator("val", 5, number))
        for images, number in ((own, 1), (own, 1), (own, 2), (follows, 1))
    )
    assert torch.equal(first, same) and not torch.equal(first, other)
    assert torch.equal(first, of_experiment)
