"""The multi-layer perceptron `mlp`: flatten, hidden layers with ReLU, and a last linear layer `fc`."""

from __future__ import annotations

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
        out: Tensor = self.fc(self.layers(self.flatten(x)))
        return out
