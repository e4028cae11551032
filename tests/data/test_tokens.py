"""Samples of tokens: as described, and the same on either side of the padding."""

from __future__ import annotations

import pytest
import torch
from token_samples import made, real

GENERATED = ("repeated_tokens", "modular_addition", "names")


@pytest.mark.parametrize("name", GENERATED)
def test_samples_are_as_described_and_the_same_on_either_side_of_the_padding(name: str) -> None:
    small = {} if name == "modular_addition" else {"val_size": 20}
    info, right = made(name, **small)
    left_info, left = made(name, padding="left", **small)
    assert left_info.inputs.keys() - info.inputs.keys() == {"position_ids"}
    assert info.vocab_size is not None and info.tokenizer is not None
    for number in range(20):
        inputs, target = right[number]
        assert {key: tuple(each.shape) for key, each in inputs.items()} == {
            key: each.shape for key, each in info.inputs.items()
        }
        ids, targets = real((inputs, target))
        assert real(left[number]) == (ids, targets) == real(right[number])
        assert max(ids) < info.vocab_size and max(targets) >= 0
        there = left[number][0]
        assert there["position_ids"][there["attention_mask"].bool()].tolist() == list(range(len(ids)))
        assert int(there["attention_mask"][-1]) == 1 == int(inputs["attention_mask"][0])
    numbers = torch.arange(20)
    assert all(each.shape == (20, 2) for each in right.spans(numbers).values())
    assert set(right.spans(numbers)) == set(info.spans)
    with pytest.raises(IndexError):
        right[len(right)]
