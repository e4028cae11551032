"""`tutorial/functions`: four modules `Function_A` to `Function_D` in two layers, for `apply` hooks by class name.

The class names are the tutorial's: a hook selects them as `type:Function_*`.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn


class _Function(nn.Module):
    """Base class: an elementwise operation of the input and the parameter `W` [2, 2], drawn from [0, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.rand(2, 2))


class Function_A(_Function):
    """X + W."""

    def forward(self, x: Tensor) -> Tensor:
        """[2, 2] to [2, 2]."""
        return x + self.W


class Function_B(_Function):
    """X - W."""

    def forward(self, x: Tensor) -> Tensor:
        """[2, 2] to [2, 2]."""
        return x - self.W


class Function_C(_Function):
    """X · W, elementwise."""

    def forward(self, x: Tensor) -> Tensor:
        """[2, 2] to [2, 2]."""
        return x * self.W


class Function_D(_Function):
    """X / W, elementwise."""

    def forward(self, x: Tensor) -> Tensor:
        """[2, 2] to [2, 2]."""
        return x / self.W


class Functions(nn.Module):
    """`ab.a`, `ab.b`, `cd.c` and `cd.d` in turn on the buffer `x` [2, 2], drawn from [0, 1) first; a batch is ignored.

    For `train.loss=output_mean`.
    """

    x: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("x", torch.rand(2, 2))
        self.ab = nn.Sequential(OrderedDict(a=Function_A(), b=Function_B()))
        self.cd = nn.Sequential(OrderedDict(c=Function_C(), d=Function_D()))

    def forward(self, x: Tensor | None = None) -> Tensor:
        """Return the output of `cd.d` [2, 2]."""
        out: Tensor = self.cd(self.ab(self.x))
        return out
