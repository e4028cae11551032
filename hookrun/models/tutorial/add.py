"""`tutorial/add`: the sum of two numbers, for hooks that read and change a module's inputs and output."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Add(nn.Module):
    """x1 + x2."""

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Two tensors to their sum."""
        return torch.add(x1, x2)


class AddTwo(nn.Module):
    """The parameters `x1` and `x2` [1], drawn from [0, 1) in this order, and the module `add`; a batch is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.x1 = nn.Parameter(torch.rand(1))
        self.x2 = nn.Parameter(torch.rand(1))
        self.add = Add()

    def forward(self, x: Tensor | None = None) -> Tensor:
        """Return the output of `add` [1]."""
        out: Tensor = self.add(self.x1, self.x2)
        return out
