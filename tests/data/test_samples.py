"""What kinds of data share: descriptions, samples in a fixed order, root folders and splits that never change."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from hookrun.data.info import SPLITS, DataInfo, TensorInfo
from hookrun.data.samples import Samples, TensorSamples, transformed
from hookrun.data.source import part_of, val_count
from hookrun.errors import SpecError


def double(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def increase(value: torch.Tensor) -> torch.Tensor:
    return value + 1


ROWS = TensorSamples(torch.arange(3.0), torch.tensor([0, 10, 20]))


def test_transforms_apply_in_order_to_a_copy_of_the_one_input() -> None:
    value, target = transformed(ROWS, [double, increase])[2]
    assert (float(value), int(target)) == (5, 20)  # type: ignore[arg-type]
    assert float(ROWS[2][0]) == 2  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="one input tensor, found dict"):
        transformed(Samples(1, lambda number: ({"a": torch.zeros(1)}, torch.zeros(()))), [double])[0]


def test_a_batch_in_one_go_is_the_batch_of_its_rows() -> None:
    indices = [2, 0, 2]
    inputs, targets = ROWS.batch(indices)
    rows = [ROWS[index] for index in indices]
    assert torch.equal(inputs, torch.stack([x for x, _ in rows]))  # type: ignore[arg-type]
    assert torch.equal(targets, torch.stack([y for _, y in rows]))
    assert transformed(ROWS, [double]).batch(indices) is None  # one by one, as a step takes one sample


IMAGE = TensorInfo((3, 8, 8), torch.float32)
LABEL = TensorInfo((), torch.int64)
PLAIN = DataInfo("plain", IMAGE, LABEL, 10, {"train": 8, "val": 2})
NAMED = DataInfo("named", {"ids": LABEL, "image": IMAGE}, None, None, {"train": 8, "val": 0})


def test_an_example_is_a_batch_of_zeros_in_form() -> None:
    assert PLAIN.shape == (3, 8, 8)
    assert PLAIN.dtype == torch.float32
    assert str(IMAGE) == "[3, 8, 8] float32"
    batch = PLAIN.example(4)
    assert isinstance(batch, torch.Tensor)
    assert batch.shape == (4, 3, 8, 8)
    assert batch.dtype == torch.float32
    assert int(batch.count_nonzero()) == 0
    target = PLAIN.example_target(4)
    assert target.shape == (4,)
    assert target.dtype == torch.int64


def test_named_inputs_give_a_batch_by_name() -> None:
    batch = NAMED.example(2)
    assert isinstance(batch, dict)
    assert {name: (tuple(t.shape), t.dtype) for name, t in batch.items()} == {
        "ids": ((2,), torch.int64),
        "image": ((2, 3, 8, 8), torch.float32),
    }
    with pytest.raises(SpecError, match=r"data\.args\.input: .*: ids, image"):
        _ = NAMED.shape
    without_target = default_collate([torch.empty(0), torch.empty(0)])
    assert torch.equal(NAMED.example_target(2), without_target)


FRACTIONS = st.floats(0, 1)


@given(st.integers(0, 300), FRACTIONS)
def test_the_parts_of_a_split_are_disjoint(total: int, fraction: float) -> None:
    train, val = (list(part_of(total, fraction, split)) for split in SPLITS)
    assert sorted(train + val) == list(range(total))
    assert train == sorted(train)
    assert val == sorted(val)
    assert len(val) == val_count(total, fraction)
    assert abs(len(val) - total * fraction) <= 1
    if total > 1 and 0 < fraction < 1:
        assert train
        assert val, "neither part is empty unless that is requested"


def test_the_split_has_the_recorded_indices_or_one_empty_part() -> None:
    assert part_of(12, 0.25, "val") == [4, 6, 11]
    for fraction, full, empty in ((0, "train", "val"), (1, "val", "train")):
        assert [*part_of(3, fraction, full)] == [0, 1, 2]
        assert not part_of(3, fraction, empty)
