"""`tutorial/activations`: a net with a nested container, for hooks on every layer that holds no others."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from hookrun.models.arguments import Size

Edge = Annotated[int, Field(ge=2, strict=True)]  # halved once


class Activations(nn.Module):
    """Leaves in the order they run: `conv`, `relu`, `fc1`, `seq.0`, `seq.1`, and no others.

    `relu` gives pictures of half the size, 4x4 in the tutorial. Flattening is not a module, so there are five leaves.

    in_channels: channels of an image; from the data set unless given
    image_size:  height and width of an image, at least 2 each; from the data set unless given
    num_classes: width of the output; from the data set unless given
    """

    def __init__(
        self, in_channels: Size = 3, image_size: tuple[Edge, Edge] = (8, 8), num_classes: Size = 2
    ) -> None:
        super().__init__()
        height, width = image_size
        self.conv = nn.Conv2d(in_channels, 10, kernel_size=2, stride=2)
        self.relu = nn.ReLU()
        self.fc1 = nn.Linear(10 * (height // 2) * (width // 2), 5)
        self.seq = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Images [batch, in_channels, height, width] to scores [batch, num_classes]."""
        out: Tensor = self.seq(self.fc1(self.relu(self.conv(x)).flatten(start_dim=1)))
        return out
