"""`tutorial/pooling`: convolution, ReLU, adaptive pooling and a linear layer with one output per image."""

from __future__ import annotations

from torch import Tensor, nn

from hookrun.models.arguments import Size


class Pooling(nn.Module):
    """`conv`, `relu`, `pool`, `flatten` and `fc` on the data set's images, in the tutorial one of [3, 10, 10].

    The output of `pool` is [batch, 8, 4, 4] for images of any size from 2x2 on. Its gradient on a GPU has no
    deterministic form in torch: to train there, set `compute.deterministic: false`.

    in_channels: channels of an image; from the data set unless given
    """

    def __init__(self, in_channels: Size = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 8, kernel_size=2)
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(128, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Images [batch, in_channels, height, width] to numbers [batch, 1]."""
        out: Tensor = self.fc(self.flatten(self.pool(self.relu(self.conv(x)))))
        return out
