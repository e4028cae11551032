"""Sequences of tokens, each repeated once."""

from __future__ import annotations

import torch
from token_samples import made, real, refusal

from hookrun.data.samples import IGNORED


def test_the_second_half_repeats_the_first_and_is_predictable() -> None:
    _, samples = made("repeated_tokens", half=[2, 9], vocab_size=12, val_size=50)
    spans = samples.spans(torch.arange(50))
    lengths = set()
    for number in range(50):
        ids, targets = real(samples[number])
        first, second = (ids[slice(*spans[name][number].tolist())] for name in ("first", "second"))
        assert first == second and [0, *first, *second] == ids and len(set(first)) == len(first)
        assert targets[len(first) + 1 : -1] == second[1:]
        assert set(targets[: len(first) + 1]) | {targets[-1]} == {IGNORED}
        lengths.add(len(first))
    assert lengths == set(range(2, 10))
    assert "9 different tokens do not fit" in refusal("repeated_tokens", half=[2, 9], vocab_size=9)
    _, every = made("repeated_tokens", predict="all", half=[3, 3])
    ids, targets = real(every[0])
    assert targets == [*ids[1:], IGNORED]
