"""Generated data: sizes of the splits, and a generator for each sample."""

from __future__ import annotations

import pytest
import torch

from hookrun.data.generated import GeneratedTokensArgs, generator_of
from hookrun.errors import SpecError


def test_the_numbers_drawn_depend_on_the_name() -> None:
    first, same, other = (
        torch.rand(4, generator=generator_of(name)) for name in ("0/val/1", "0/val/1", "0/val/2")
    )
    assert torch.equal(first, same) and not torch.equal(first, other)


def test_a_split_without_samples_is_refused_where_it_is_used() -> None:
    args = GeneratedTokensArgs(train_size=0, val_size=3)
    assert args.sizes() == {"train": 0, "val": 3} and args.size("val") == 3
    with pytest.raises(SpecError, match=r"data\.args\.train_size: the split 'train' has no samples"):
        args.size("train")


def test_samples_have_a_seed_of_their_own_unless_it_is_null() -> None:
    assert GeneratedTokensArgs(seed=5).stream("val", 7) == "5/val"
    assert GeneratedTokensArgs(seed=None).stream("val", 7) == "7/val"
