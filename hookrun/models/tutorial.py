"""The small networks of the hook tutorials: a family of models under the names `tutorial/...`.

Most of them come with their own input, drawn in the constructor as the tutorial draws it, so that an experiment with
the tutorial's `seed` shows the tutorial's numbers whatever the data set is. Their `forward(x=None)` takes a batch,
because every training loop passes one, and ignores it. Tensors whose gradient the tutorial looks at are parameters, the
other inputs are buffers.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated

import torch
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
        return self.seq(self.fc1(self.relu(self.conv(x)).flatten(start_dim=1)))


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
        return self.add(self.x1, self.x2)


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
        return self.b(self.a)


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
        return self.cd(self.ab(self.x))


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
        return self.fc(self.flatten(self.pool(self.relu(self.conv(x)))))


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
        return self.function(self.x1, self.x2)


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
        return self.loss(self.y(self.x, self.w, self.b))


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
        return self.loss(self.fc(self.flatten(self.relu(self.conv(self.x)))))
