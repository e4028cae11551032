"""Samples have a fixed order; their input goes through the transforms, their target does not."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from hookrun.data.samples import Sample, Samples, TensorSamples, Transformed, unit_float


def double(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def increase(value: torch.Tensor) -> torch.Tensor:
    return value + 1


class Named(Samples):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Sample:
        return {"a": torch.zeros(1)}, torch.zeros(())


ROWS = TensorSamples(torch.arange(3.0), torch.tensor([0, 10, 20]))


def test_row_i_is_sample_i() -> None:
    assert len(ROWS) == 3
    assert [(float(x), int(y)) for x, y in ROWS] == [(0, 0), (1, 10), (2, 20)]  # type: ignore[arg-type]


def test_past_the_end_is_an_index_error() -> None:
    with pytest.raises(IndexError):
        ROWS[3]
    with pytest.raises(IndexError):
        Transformed(ROWS, [double])[3]


def test_transforms_apply_in_order_to_the_input_only() -> None:
    value, target = Transformed(ROWS, [double, increase])[2]
    assert (float(value), int(target)) == (5, 20)  # type: ignore[arg-type]


def test_the_source_is_not_changed() -> None:
    Transformed(ROWS, [double])[1]
    assert float(ROWS[1][0]) == 1  # type: ignore[arg-type]


def test_inputs_by_name_take_no_transforms() -> None:
    with pytest.raises(TypeError, match="one input tensor, found dict"):
        Transformed(Named(), [double])[0]


def test_samples_pickle_for_worker_processes_and_batch() -> None:
    samples = pickle.loads(pickle.dumps(Transformed(ROWS, [double])))
    ((inputs, targets),) = DataLoader(samples, batch_size=3)
    assert (inputs.tolist(), targets.tolist()) == ([0, 2, 4], [0, 10, 20])


def test_bytes_become_floats_in_zero_to_one() -> None:
    image = torch.tensor([0, 51, 255], dtype=torch.uint8)
    assert torch.equal(unit_float(image), torch.tensor([0, 0.2, 1]))
    assert image.tolist() == [0, 51, 255]


def test_a_batch_in_one_go_is_the_batch_of_its_rows() -> None:
    indices = [2, 0, 2]
    inputs, targets = ROWS.batch(indices)
    rows = [ROWS[index] for index in indices]
    assert torch.equal(inputs, torch.stack([x for x, _ in rows]))  # type: ignore[arg-type]
    assert torch.equal(targets, torch.stack([y for _, y in rows]))
    assert Transformed(ROWS, [double]).batch(indices) is None  # one by one, as a step takes one sample
