"""A sharded tensor is seen whole, and each rank keeps its own part of the result; other tensors are not changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookrun.runtime.sharded import edited, is_sharded, like, own_part, whole, whole_of


class Op:
    """A firing that adds a number, or does nothing for 0."""

    def __init__(self, number: float) -> None:
        self.number = number

    def op(self, x: Tensor) -> Tensor:
        return x if self.number == 0 else x + self.number


def test_an_unsharded_tensor_is_passed_as_the_same_object() -> None:
    x = torch.zeros(2)
    assert not is_sharded(x)
    assert all(each is x for each in (whole(x), own_part(x), like(x, torch.ones(2)), whole_of(x, x)))
    unchanged: Any = [Op(0)]
    changing: Any = [Op(1), Op(2)]
    assert edited(x, unchanged) is x
    assert edited(x, changing).tolist() == [3, 3] and x.tolist() == [0, 0]
