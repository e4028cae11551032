"""A large tensor edited part by part has the result of edits of the whole tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from hookrun.runtime.in_parts import SMALLEST, divisible, in_parts


def test_edits_part_by_part_equal_those_of_the_whole_tensor() -> None:
    def double(x: Tensor, out: Tensor) -> object:
        return torch.mul(x, 2, out=out)

    def lowered(x: Tensor, out: Tensor) -> object:
        return torch.sub(x, 1, out=out)

    x = torch.arange(SMALLEST + 3, dtype=torch.float32)
    expected = x * 2 - 1
    before = x.clone()
    assert torch.equal(in_parts([double, lowered], x), expected) and torch.equal(x, before)
    assert in_parts([double, lowered], x, overwrite=True) is x and torch.equal(x, expected)


def test_only_large_plain_tensors_without_gradients_are_divided() -> None:
    x = torch.zeros(SMALLEST)
    assert divisible(x)
    for other in (x[1:], x.long(), x.view(1024, -1).t(), nn_parameter(x), x.to("meta"), [x]):
        assert not divisible(other)
    with torch.no_grad():
        assert divisible(x.clone().requires_grad_())


def nn_parameter(x: Tensor) -> Tensor:
    return torch.nn.Parameter(x)
