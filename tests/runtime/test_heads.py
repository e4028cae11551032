"""Heads are found in the last dimension or in a head dimension; an ambiguous tensor is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hookrun.plan.heads import HeadCount
from hookrun.runtime.heads import HeadsPart
from hookrun.spec.heads import Heads


def heads(*pick: int, count: int = 4, not_dim: int = -1) -> HeadsPart:
    return HeadsPart(Heads.model_validate({"pick": list(pick)}), HeadCount((count,)), not_dim)


def numbers(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def test_heads_are_read_and_written_in_either_layout() -> None:
    flat, apart = numbers(2, 3, 8), numbers(2, 4, 3, 5)
    part = heads(1, 3)
    assert torch.equal(part.of(flat), flat.unflatten(-1, (4, 2))[..., [1, 3], :])
    assert torch.equal(part.of(apart), apart[:, [1, 3]])
    for whole in (flat, apart):
        new = part.put(whole, torch.zeros_like(part.of(whole)))
        assert new.shape == whole.shape and not part.of(new).any()
        assert torch.equal(heads(0, 2).of(new), heads(0, 2).of(whole))


def test_a_tensor_whose_heads_cannot_be_found_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dimensions \[1, 2\] .* could all be the head dimension"):
        heads(0).of(numbers(2, 4, 4, 5))
    assert heads(0, not_dim=2).of(numbers(2, 4, 4, 5)).shape == (2, 1, 4, 5)
    with pytest.raises(ValueError, match="does not hold 4 heads"):
        heads(0).of(numbers(2, 3, 7))
