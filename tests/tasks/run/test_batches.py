"""Batches of a split: their order, their ids, limits, and the random numbers of their samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from hookrun.data import DataInfo, describe
from hookrun.runtime.rng import derived_seed
from hookrun.spec import Settings
from hookrun.tasks import parse_experiment
from hookrun.tasks.run.batches import Batches, BatchesOfSplits, rows_of_rank


@dataclass
class Source:
    """Settings, and the device of the batches."""

    settings: Settings
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass
class Described(Source):
    """A source with the description of the data."""

    @property
    def data(self) -> DataInfo:
        return describe(self.settings.data, "train")


def source(**sections: Any) -> Source:
    settings = {"model": {"name": "cnn"}, "data": {"name": "digits"}}
    return Source(parse_experiment(settings | sections).settings)


def of_torch(batches: Batches, seed: int) -> list[list[int]]:
    """The sample numbers of each batch of torch's own loader with this seed."""
    generator = torch.Generator().manual_seed(seed)
    numbers = range(batches.samples)
    sampler = RandomSampler(numbers, generator=generator)
    loader = DataLoader(numbers, 64, sampler=sampler, generator=generator)  # type: ignore[arg-type]
    return [numbers.tolist() for numbers in loader]


@pytest.mark.parametrize(
    ("limit", "starts"), [(3, (0, 2, 3)), (None, (0, 21))]
)  # the last batch is a smaller one
def test_rows_in_memory_and_loaded_have_torchs_order(limit: Any, starts: tuple[int, ...]) -> None:
    made = source(train={"limit_batches": limit})
    for shuffle in (True, False):
        fast, slow = (Batches(made, "train", shuffle=shuffle) for _ in range(2))
        assert fast._in_memory is not None
        slow._in_memory = None
        for epoch, start in enumerate(starts):
            ours, theirs = list(fast.epoch(epoch, start)), list(slow.epoch(epoch, start))
            assert len(ours) == len(theirs) == len(fast) - start
            for one, other in zip(ours, theirs, strict=True):
                assert torch.equal(one.ids, other.ids) and torch.equal(one.target, other.target)
                assert torch.equal(one.inputs, other.inputs) and one.whole == other.whole
            if shuffle:
                expected = of_torch(fast, derived_seed(made.settings.seed, epoch))
                assert [batch.ids.tolist() for batch in ours] == expected[start : len(fast)]


def test_an_epoch_has_each_sample_once_in_its_own_order() -> None:
    batches = Batches(source(data={"name": "digits", "batch_size": 100}), "train", shuffle=True)
    first, second, again = (torch.cat([each.ids for each in batches.epoch(of)]) for of in (0, 1, 0))
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert first.sort().values.tolist() == list(range(batches.samples))
    batch = next(batches.epoch(0))
    assert torch.equal(batch.inputs, torch.stack([batches.data[int(number)][0] for number in batch.ids]))
    assert batch.weight == batch.whole == 100 and batch.population == batches.samples


def test_a_sample_s_random_numbers_do_not_depend_on_where_a_pass_begins() -> None:
    data = {
        "name": "fake_images",
        "batch_size": 4,
        "args": {"train_size": 16, "shape": [1, 4, 4]},
        "train_transforms": {"random_horizontal_flip": None},
    }
    batches = Batches(source(data=data), "train", shuffle=True)
    assert batches._in_memory is None
    whole, rest = list(batches.epoch(3)), list(batches.epoch(3, start=2))
    assert len(whole) == len(batches) == len(rest) + 2
    for one, other in zip(whole[2:], rest, strict=True):
        assert torch.equal(one.ids, other.ids) and torch.equal(one.inputs, other.inputs)
    others = {
        int(number): batch.inputs[row] for batch in batches.epoch(4) for row, number in enumerate(batch.ids)
    }
    same = [
        torch.equal(batch.inputs[row], others[int(number)])
        for batch in whole
        for row, number in enumerate(batch.ids)
    ]
    assert any(same) and not all(same), "other epochs have other draws"


def test_several_splits_are_passed_one_after_the_other_from_any_batch() -> None:
    made = source(data={"name": "digits", "batch_size": 600})
    both = BatchesOfSplits(cast(Any, Described(made.settings)), ("train", "val"))
    seen = [(batch.split, len(batch.ids)) for batch in both.epoch(0)]
    assert len(both) == len(seen) and seen[-1][0] == "val" and seen[0] == ("train", 600)
    for start in range(len(seen) + 1):
        assert [(batch.split, len(batch.ids)) for batch in both.epoch(0, start)] == seen[start:], start


def test_a_rank_without_rows_loads_a_marked_placeholder() -> None:
    batches = [[0, 1, 2], [3, 4, 5], [6]]
    loaded = [[rows_of_rank(batch, rank, 2) for batch in batches] for rank in range(2)]
    assert loaded == [[[0, 1], [3, 4], [6]], [[2], [5], [~6]]]
