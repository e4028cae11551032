"""`tutorial/doubling`: b = 2a, where a is five ones, for hooks on the gradients of both."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Double(nn.Module):
    """Twice its input."""

    def forward(self, a: Tensor) -> Tensor:
        """A tensor to one of the same shape."""
        return 2 * a


class Doubling(nn.Module):
    """The parameter `a` of ones [5] and the module `b`, named after its output; a batch is ignored.

    Under `train.loss=output_mean` the gradient of b is 0.2 and that of `a` 0.4, five times each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(5))
        self.b = Double()

    def forward(self, x: Tensor | None = None) -> Tensor:
        """Return b [5]."""
        b: Tensor = self.b(self.a)
        return b
