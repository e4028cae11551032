"""Inside `computing`, operations are executed directly, under any mode or trace."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hookrun.runtime.direct_computation import computes, computing


def test_fake_tensors_and_transforms_are_left_and_entered_again() -> None:
    assert computes()
    with FakeTensorMode():
        assert not computes()
        with computing():
            assert computes() and not isinstance(torch.ones(2), FakeTensor)
        assert not computes() and isinstance(torch.ones(2), FakeTensor)
    count = torch.zeros(())

    def counted(x: Tensor) -> Tensor:
        assert not computes()
        with computing():
            count.add_(1)
        return x * 2

    assert torch.vmap(counted)(torch.ones(3)).tolist() == [2.0] * 3
    assert count.item() == 1 and computes()
