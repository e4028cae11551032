"""Batches of a split: their order, their ids, limits, and the random numbers of their samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.utils.data import SequentialSampler

from hookrun.data import DataInfo, describe
from hookrun.spec import Settings
from hookrun.tasks import parse_experiment
from hookrun.tasks.loop.batches import Batches, BatchesOfSplits, RankRows


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


def test_rows_in_memory_have_the_order_of_torchs_loader() -> None:
    for limit, starts in ((3, (0, 2, 3)), (None, (0, 21))):  # the last batch of all is a smaller one
        made = source(train={"limit_batches": limit})
        for shuffle in (True, False):
            fast, slow = (Batches(made, "train", shuffle=shuffle) for _ in range(2))
            assert fast._in_memory is not None
            slow._in_memory = None
            for epoch, start in enumerate(starts):
                seen = 0
                for ours, theirs in zip(fast.epoch(epoch, start), slow.epoch(epoch, start), strict=True):
                    assert torch.equal(ours.ids, theirs.ids) and torch.equal(ours.target, theirs.target)
                    assert torch.equal(ours.inputs, theirs.inputs) and ours.whole == theirs.whole
                    seen += 1
                assert seen == len(fast) - start


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
    assert batches._numbered.draws
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
    ranks = [RankRows(SequentialSampler(range(7)), 3, rank, 2) for rank in range(2)]
    assert [list(each) for each in ranks] == [[[0, 1], [3, 4], [6]], [[2], [5], [~6]]]
    assert [len(each) for each in ranks] == [3, 3]
