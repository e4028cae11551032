"""`tutorial/regression`: y = x·w + b and the sum of its squares, which is the model's own loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Affine(nn.Module):
    """x·w + b."""

    def forward(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        """Three tensors [n, k], [k], [n] to y [n]."""
        return torch.matmul(x, w) + b


class SquareSum(nn.Module):
    """The sum of squares."""

    def forward(self, y: Tensor) -> Tensor:
        """Any tensor to a scalar."""
        return y.square().sum()


class Regression(nn.Module):
    """The parameters `w` [5] and `b` [3], drawn in this order, the buffer `x` of ones [3, 5]; a batch is ignored.

    The modules are named after their outputs, `y` and `loss`. With `seed: 2` and `train.loss=output` the gradient
    of y and of `b` is [-1.8891, 0.5235, 0.4592] and that of `w` five times -0.9064.
    """

    x: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5))
        self.b = nn.Parameter(torch.randn(3))
        self.register_buffer("x", torch.ones(3, 5))
        self.y = Affine()
        self.loss = SquareSum()

    def forward(self, x: Tensor | None = None) -> Tensor:
        """Return the loss, a scalar."""
        loss: Tensor = self.loss(self.y(self.x, self.w, self.b))
        return loss
