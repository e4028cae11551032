"""Map-style data sets of (input, target) pairs: rows of tensors in memory, and a data set under transforms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hookrun.spec.when import Scalar

IGNORED = -100
"""The target of positions without a target; the default `ignore_index` of torch's cross_entropy."""

Inputs = Tensor | dict[str, Tensor]
Sample = tuple[Inputs, Tensor]
Step = Callable[[Tensor], Tensor]


class Samples(Dataset[Sample], ABC):
    """A data set of fixed order and length: sample i has the sample id i.

    classes:     the name of each label; None if labels have no names
    field_names: of the fields of the data's own that samples may have
    of_tokens:   a sample is a sequence of tokens, and its target the next token at each position, or IGNORED
    """

    classes: Sequence[str] | None = None
    field_names: Collection[str] = ()
    of_tokens: ClassVar[bool] = False

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @abstractmethod
    def __getitem__(self, index: int) -> Sample:
        """The input and the target of one sample. Raises IndexError past the end."""

    def batch(self, indices: Sequence[int]) -> Sample | None:
        """Inputs and targets [len(indices), ...] of several samples; None if they must be read one by one."""
        return None

    def file(self, index: int) -> str:
        """The file of the sample below the data's root, or a row of a file; ``""`` if it is not known."""
        return ""

    def fields(self, index: int) -> Mapping[str, Scalar]:
        """The fields of the sample in the data's file; see `field_names`."""
        return {}

    def spans(self, ids: Tensor) -> Mapping[str, Tensor]:
        """Of sequences of tokens: name -> [len(ids), 2] int64, the first position and the end (excluded) of a span.

        They count from the sample's first real token. A sample without a span of that name has -1 and -1.
        """
        return {}

    def wrong(self, ids: Tensor) -> Tensor | None:
        """[len(ids)] int64: the token of each wrong answer (the target is the right one); None: no wrong answers."""
        return None

    def class_name(self, label: int) -> str:
        """The name of a label, or its number if it has no name."""
        known = self.classes or ()
        return known[label] if 0 <= label < len(known) else str(label)


class MadeSamples(Samples):
    """Samples that a function makes from their numbers, each time that they are read.

    count: the number of samples
    make:  number -> the sample
    place: number -> its file, or a row of a file; None: it is not known
    """

    def __init__(
        self,
        count: int,
        make: Callable[[int], Sample],
        place: Callable[[int], str] | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        self._count, self._make, self._place = count, make, place
        self.classes = classes

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sample:
        return self._make(range(self._count)[index])  # negative counts from the end, past it IndexError

    def file(self, index: int) -> str:
        return "" if self._place is None else self._place(index)


class TensorSamples(Samples):
    """The rows of two tensors, [N, ...] inputs and [N, ...] targets."""

    def __init__(self, inputs: Tensor, targets: Tensor, classes: Sequence[str] | None = None) -> None:
        self._inputs = inputs
        self._targets = targets
        self.classes = classes

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> Sample:
        return self._inputs[index], self._targets[index]

    def batch(self, indices: Sequence[int] | Tensor) -> Sample:
        """Several samples by one indexing operation; indices may also be a tensor [B] int64."""
        rows = indices if isinstance(indices, Tensor) else torch.tensor(indices, dtype=torch.int64)
        return self._inputs[rows], self._targets.index_select(0, rows)


class Transformed(Samples):
    """Another data set, each step applied to its input tensor in turn."""

    def __init__(self, source: Samples, steps: Sequence[Step]) -> None:
        self._source = source
        self._steps = tuple(steps)
        self.classes = source.classes

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Sample:
        value, target = self._source[index]
        if not isinstance(value, Tensor):
            raise TypeError(f"transforms take one input tensor, found {type(value).__name__}")
        for step in self._steps:
            value = step(value)
        return value, target

    def file(self, index: int) -> str:
        """The file of the sample in the data set without transforms."""
        return self._source.file(index)


def unit_float(image: Tensor) -> Tensor:
    """A uint8 image as float32 in 0..1, of the same shape."""
    return image.to(torch.float32).div_(255)
