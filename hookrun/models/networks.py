"""The small networks for images: `mlp`, hidden layers with ReLU, and `cnn`, two convolutions; both end in `fc`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from hookrun.models.arguments import Size


class MLP(nn.Module):
    """A multi-layer perceptron from samples of any shape to one logit per class.

    Modules: `flatten`, `layers` (linear and ReLU: `layers.0` is the first linear, `layers.1` its ReLU), `fc`.

    in_features: numbers in one sample; from the data set unless given
    num_classes: width of the output; from the data set unless given
    hidden:      widths of the hidden layers; with an empty list there is only `fc`
    """

    def __init__(self, in_features: Size, num_classes: Size, hidden: tuple[Size, ...] = (64, 64)) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.layers = nn.Sequential()
        width = in_features
        for next_width in hidden:
            self.layers.append(nn.Linear(width, next_width))
            self.layers.append(nn.ReLU())
            width = next_width
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, *sample shape] to scores [batch, num_classes]."""
        return self.fc(self.layers(self.flatten(x)))


Edge = Annotated[int, Field(ge=4, strict=True)]  # halved twice


class CNN(nn.Module):
    """A convolutional network from images (digits are 1x8x8, CIFAR 3x32x32) to one logit per class.

    Modules in the order they run: `conv1`, `relu1`, `pool1`, `conv2`, `relu2`, `pool2`, `flatten`, `fc`. Every step
    is a module, so that a hook can be placed on it. No ReLU works in place, there is no normalisation that would undo a
    scaled or shifted activation, and no adaptive pooling, whose gradients are not deterministic on a GPU. The initial
    weights of the convolutions are drawn from the normal distribution of He et al. 2015 (arXiv:1502.01852).

    in_channels: channels of an image; from the data set unless given
    image_size:  height and width of an image, at least 4 each; from the data set unless given
    num_classes: width of the output; from the data set unless given
    channels:    output channels of the two convolutions
    """

    def __init__(
        self,
        in_channels: Size,
        image_size: tuple[Edge, Edge],
        num_classes: Size,
        channels: tuple[Size, Size] = (32, 128),
    ) -> None:
        super().__init__()
        (height, width), (first, second) = image_size, channels
        self.conv1 = nn.Conv2d(in_channels, first, kernel_size=3, padding=1)
        self.relu1 = nn.ReLU()
        self.pool1 = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(first, second, kernel_size=3, padding=1)
        self.relu2 = nn.ReLU()
        self.pool2 = nn.MaxPool2d(2)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(second * (height // 4) * (width // 4), num_classes)
        for conv in (self.conv1, self.conv2):
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Images [batch, in_channels, height, width] to scores [batch, num_classes]."""
        x = self.pool1(self.relu1(self.conv1(x)))
        x = self.pool2(self.relu2(self.conv2(x)))
        return self.fc(self.flatten(x))
