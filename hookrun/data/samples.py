"""Map-style data sets of (input, target) pairs: rows of tensors in memory, and a data set under transforms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

Inputs = Tensor | dict[str, Tensor]
Sample = tuple[Inputs, Tensor]
Step = Callable[[Tensor], Tensor]


class Samples(Dataset[Sample], ABC):
    """A data set of fixed order and length: sample i has the sample id i."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @abstractmethod
    def __getitem__(self, index: int) -> Sample:
        """The input and the target of one sample. Raises IndexError past the end."""


class TensorSamples(Samples):
    """The rows of two tensors, [N, ...] inputs and [N, ...] targets."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self._inputs = inputs
        self._targets = targets

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> Sample:
        return self._inputs[index], self._targets[index]


class Transformed(Samples):
    """Another data set, each step applied to its input tensor in turn."""

    def __init__(self, source: Samples, steps: Sequence[Step]) -> None:
        self._source = source
        self._steps = tuple(steps)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Sample:
        value, target = self._source[index]
        if not isinstance(value, Tensor):
            raise TypeError(f"transforms take one input tensor, found {type(value).__name__}")
        for step in self._steps:
            value = step(value)
        return value, target


def unit_float(image: Tensor) -> Tensor:
    """A uint8 image as float32 in 0..1, of the same shape."""
    return image.to(torch.float32).div_(255)
