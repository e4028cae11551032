"""A description of one input tensor or several, with a target or without."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import default_collate

from hookrun.data.info import DataInfo, TensorInfo
from hookrun.errors import SpecError

IMAGE = TensorInfo((3, 8, 8), torch.float32)
LABEL = TensorInfo((), torch.int64)
PLAIN = DataInfo("plain", IMAGE, LABEL, 10, {"train": 8, "val": 2})
NAMED = DataInfo("named", {"ids": LABEL, "image": IMAGE}, None, None, {"train": 8, "val": 0})


def test_shape_and_dtype_are_those_of_the_one_input() -> None:
    assert (PLAIN.shape, PLAIN.dtype) == ((3, 8, 8), torch.float32)


def test_an_example_is_a_batch_of_zeros() -> None:
    batch = PLAIN.example(4)
    assert isinstance(batch, torch.Tensor)
    assert (batch.shape, batch.dtype, int(batch.count_nonzero())) == ((4, 3, 8, 8), torch.float32, 0)
    target = PLAIN.example_target(4)
    assert (target.shape, target.dtype) == ((4,), torch.int64)


def test_named_inputs_give_a_batch_by_name() -> None:
    batch = NAMED.example(2)
    assert isinstance(batch, dict)
    assert {name: (tuple(t.shape), t.dtype) for name, t in batch.items()} == {
        "ids": ((2,), torch.int64),
        "image": ((2, 3, 8, 8), torch.float32),
    }


def test_asking_for_the_one_input_of_several_is_an_error_that_names_them() -> None:
    with pytest.raises(SpecError, match="ids, image") as caught:
        _ = NAMED.shape
    assert [problem.where for problem in caught.value.errors] == ["data.args.input"]


def test_without_a_target_an_empty_one_batches_as_the_samples_do() -> None:
    batched = default_collate([torch.empty(0), torch.empty(0)])
    assert torch.equal(NAMED.example_target(2), batched)


def test_a_tensor_is_shown_by_shape_and_dtype() -> None:
    assert str(IMAGE) == "[3, 8, 8] float32"
