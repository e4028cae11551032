"""`tutorial/testnet`: convolution, ReLU, flatten and a linear layer on one image, ending in its own loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MeanBelowOne(nn.Module):
    """The mean of the differences from one: (1 - out).mean()."""

    def forward(self, out: Tensor) -> Tensor:
        """Any tensor to a scalar."""
        return (1 - out).mean()


class TestNet(nn.Module):
    """`conv`, `relu`, `flatten`, `fc` and `loss` on the buffer `x`, an image [1, 3, 8, 8]; a batch is ignored.

    `x` is drawn before the layers, as in the tutorial; it requires no gradient. `flatten` makes one vector of 160
    numbers, without a batch dimension. Under `train.loss=output` the gradient of `fc.bias` is five times -0.2.
    """

    x: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("x", torch.randn(1, 3, 8, 8))
        self.conv = nn.Conv2d(3, 10, kernel_size=2, stride=2)
        self.relu = nn.ReLU()
        self.flatten = nn.Flatten(start_dim=0)
        self.fc = nn.Linear(160, 5)
        self.loss = MeanBelowOne()

    def forward(self, x: Tensor | None = None) -> Tensor:
        """Return the loss, a scalar."""
        loss: Tensor = self.loss(self.fc(self.flatten(self.relu(self.conv(self.x)))))
        return loss
