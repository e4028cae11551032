"""A given value takes the dtype of the tensor, and the part of it that the hook acts on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import hookrun


def test_a_value_takes_the_tensor_s_dtype_and_applies_to_the_part() -> None:
    x = torch.zeros(2, 3, dtype=torch.float64)
    given = torch.tensor([1.0, 2.0, 3.0])

    def computed(part: Tensor) -> Tensor:
        return part + 5

    for keys, value, expected in (
        ({}, given, [[1, 2, 3], [1, 2, 3]]),
        ({"index": "..., :2"}, given[:2], [[1, 2, 0], [1, 2, 0]]),
        ({"index": "..., 0"}, computed, [[5, 0, 0], [5, 0, 0]]),
    ):
        model = nn.Sequential(nn.Identity())
        spec = {"h": {"select": "0", "hook": "forward", "action": "replace", "value": value, **keys}}
        with hookrun.hooked(model, spec):
            out = model(x)
        assert out.dtype is torch.float64 and out.tolist() == expected, keys
