"""`tutorial/product`: x1 · x2 · W, for hooks on the gradients of a module's inputs, output and parameter."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Function(nn.Module):
    """x1 · x2 · W with one parameter `W`, which starts at 5."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.tensor([5.0]))

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Two tensors [1] to their product with W [1]."""
        return x1 * x2 * self.W


class Product(nn.Module):
    """The parameters `x1` and `x2` [1], drawn from [0, 1) in this order, and the module `function`; a batch is ignored.

    Under `train.loss=output_mean` the output's gradient is 1, that of `x1` is 5·x2, that of `x2` 5·x1 and that of
    `function.W` x1·x2.
    """

    def __init__(self) -> None:
        super().__init__()
        self.x1 = nn.Parameter(torch.rand(1))
        self.x2 = nn.Parameter(torch.rand(1))
        self.function = Function()

    def forward(self, x: Tensor | None = None) -> Tensor:
        """Return the output of `function` [1]."""
        out: Tensor = self.function(self.x1, self.x2)
        return out
