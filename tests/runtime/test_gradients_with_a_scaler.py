"""Hooks see gradients without the factor of mixed precision's gradient scaler."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookrun.runtime.apply_action import run_unscaled

SCALE = torch.tensor(1024.0)


def test_an_op_sees_the_plain_gradient_and_its_result_is_scaled_again() -> None:
    for dtype in (torch.float32, torch.float16):
        grad, seen = torch.tensor([2.0, 2**-12], dtype=dtype), list[Any]()

        def halve(value: tuple[Tensor, None], seen: list[Any] = seen) -> tuple[Tensor, None]:
            seen.append(value[0])
            return (value[0] / 2, None)

        new, none = run_unscaled(halve, (grad, None), SCALE)
        assert seen[0].dtype is torch.float32 and torch.equal(seen[0], grad.float() / 1024), dtype
        assert new.dtype is dtype and torch.equal(new, grad / 2) and none is None, dtype


def test_an_unchanged_gradient_is_the_same_object() -> None:
    value = (torch.ones(2), torch.zeros(2))
    assert run_unscaled(lambda each: each, value, SCALE) is value
    new = run_unscaled(lambda each: (each[0], each[1] + 1), value, SCALE)
    assert new[0] is value[0] and torch.equal(new[1], torch.full((2,), 1024.0))
