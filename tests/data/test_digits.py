"""The digits: real images, installed with scikit-learn, with a fixed split."""

from __future__ import annotations

import pytest
import torch

from hookrun.data import Split, describe, load
from hookrun.data import digits as digits_module
from hookrun.data.info import TensorInfo
from hookrun.data.samples import TensorSamples
from hookrun.data.settings import Data

DIGITS = Data(name="digits")


def tensors(split: Split, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    samples = load(DIGITS, split, seed=seed)
    assert isinstance(samples, TensorSamples)
    inputs, targets = zip(*(samples[i] for i in range(len(samples))), strict=True)
    return torch.stack(inputs), torch.stack(targets)


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_description_fits_the_loaded_samples(split: Split) -> None:
    info = describe(DIGITS, split)
    inputs, targets = tensors(split)
    assert (inputs.shape[1:], inputs.dtype) == (info.shape, info.dtype) == ((1, 8, 8), torch.float32)
    assert info.target == TensorInfo((), torch.int64) == TensorInfo(targets.shape[1:], targets.dtype)
    assert len(inputs) == info.sizes[split]
    assert targets.unique().tolist() == list(range(info.num_classes or 0))


def test_a_fifth_of_each_digit_is_for_validation() -> None:
    from sklearn.datasets import load_digits

    both = torch.cat([tensors("train")[0], tensors("val")[0]]).flatten(1).mul(16)
    whole = torch.from_numpy(load_digits().data).float()
    assert torch.equal(torch.tensor(sorted(both.tolist())), torch.tensor(sorted(whole.tolist())))
    train = torch.bincount(tensors("train")[1])
    val = torch.bincount(tensors("val")[1])
    assert torch.equal(val, torch.round((train + val) * 0.2).long())
    assert torch.equal(tensors("val", seed=0)[0], tensors("val", seed=1)[0])


def test_scikit_learn_reads_them_where_its_file_is_elsewhere(monkeypatch) -> None:
    before = tensors("val")
    monkeypatch.setattr(digits_module, "_FILE", "datasets/data/elsewhere.csv.gz")
    digits_module._read.cache_clear()
    again = tensors("val")
    assert torch.equal(before[0], again[0])
    assert torch.equal(before[1], again[1])
