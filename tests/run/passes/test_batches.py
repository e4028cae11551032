"""Batches of a split: their order, their ids, limits, and the random numbers of their samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from hookrun.engine.runtime.rng import derived_seed
from hookrun.run.passes.batches import Batches
from hookrun.run.tasks import parse_experiment


def source(**sections: Any) -> Any:
    """Settings, and the device of the batches."""
    settings = {"model": {"name": "cnn"}, "data": {"name": "digits"}}
    return SimpleNamespace(
        settings=parse_experiment(settings | sections).settings, device=torch.device("cpu")
    )


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
def test_rows_in_memory_have_torch_s_order(limit: Any, starts: tuple[int, ...]) -> None:
    made = source(train={"limit_batches": limit})
    for shuffle in (True, False):
        fast = Batches(made, "train", shuffle=shuffle)
        slow = Batches(made, "train", shuffle=shuffle)
        assert fast._in_memory is not None
        slow._in_memory = None
        for epoch, start in enumerate(starts):
            ours = list(fast.epoch(epoch, start))
            theirs = list(slow.epoch(epoch, start))
            assert len(ours) == len(theirs) == len(fast) - start
            for one, other in zip(ours, theirs, strict=True):
                assert torch.equal(one.ids, other.ids)
                assert torch.equal(one.target, other.target)
                assert torch.equal(one.inputs, other.inputs)
                assert one.whole == other.whole
            if shuffle:
                expected = of_torch(fast, derived_seed(made.settings.seed, epoch))
                assert [batch.ids.tolist() for batch in ours] == expected[start : len(fast)]


def test_random_numbers_do_not_depend_on_where_a_pass_begins() -> None:
    data = {
        "name": "fake_images",
        "batch_size": 4,
        "args": {"train_size": 16, "shape": [1, 4, 4]},
        "train_transforms": {"random_horizontal_flip": None},
    }
    batches = Batches(source(data=data), "train", shuffle=True)
    assert batches._in_memory is None
    whole = list(batches.epoch(3))
    rest = list(batches.epoch(3, 2))
    another = list(batches.epoch(4))
    assert len(whole) == len(batches) == len(rest) + 2
    for one, other in zip(whole[2:], rest, strict=True):
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.inputs, other.inputs)
    second = dict[int, torch.Tensor]()
    for batch in another:
        second.update(zip(batch.ids.tolist(), batch.inputs, strict=True))
    same = list[bool]()
    for batch in whole:
        for number, row in zip(batch.ids.tolist(), batch.inputs, strict=True):
            same.append(torch.equal(row, second[number]))
    assert any(same)
    assert not all(same), "other epochs have other draws"
