"""Map-style data sets of (input, target) pairs: made by a function, rows of tensors in memory, under transforms."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hookrun.engine.spec.when import Scalar

IGNORED = -100
"""The target of positions without a target; the default `ignore_index` of torch's cross_entropy."""

Inputs = Tensor | dict[str, Tensor]
Sample = tuple[Inputs, Tensor]
Step = Callable[[Tensor], Tensor]


@dataclass(eq=False, repr=False)
class Samples(Dataset[Sample]):
    """A data set of fixed order and length, whose samples a function makes each time that they are read.

    Sample i has the sample id i.

    count:   the number of samples
    make:    number -> the sample
    place:   number -> its file below the data's root, or a row of a file; None: it is not known
    classes: the name of each label; empty if labels have no names

    field_names: of the fields of the data's own that samples may have
    of_tokens:   a sample is a sequence of tokens, and its target the next token at each position, or IGNORED
    draws:       its transforms change a sample at random each time that it is read
    sampler:     a sampler of the user's own, which gives the numbers of the samples of each batch; None: there is none
    """

    of_tokens: ClassVar[bool] = False

    count: int
    make: Callable[[int], Sample]
    place: Callable[[int], str] | None = None
    classes: Sequence[str] = ()
    field_names: Collection[str] = field(default=(), init=False)
    draws: bool = field(default=False, init=False)
    sampler: Any = field(default=None, init=False)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        """The input and the target of one sample. Raises IndexError past the end."""
        return self.make(range(self.count)[index])  # negative counts from the end

    def batch(self, indices: Sequence[int]) -> Sample | None:
        """Inputs and targets [len(indices), ...] of several samples; None if they must be read one by one."""
        return None

    def file(self, index: int) -> str:
        """The file of the sample below the data's root, or a row of a file; ``""`` if it is not known."""
        return "" if self.place is None else self.place(index)

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
        return self.classes[label] if 0 <= label < len(self.classes) else str(label)


class TensorSamples(Samples):
    """The rows of two tensors, [N, ...] inputs and [N, ...] targets."""

    def __init__(self, inputs: Tensor, targets: Tensor, classes: Sequence[str] = ()) -> None:
        super().__init__(len(inputs), partial(_row, inputs, targets), classes=classes)
        self._inputs = inputs
        self._targets = targets

    def batch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Several samples by one indexing operation; indices may also be a tensor [B] int64."""
        rows = indices if isinstance(indices, Tensor) else torch.tensor(indices, dtype=torch.int64)
        return self._inputs.index_select(0, rows), self._targets.index_select(0, rows)


def _row(inputs: Tensor, targets: Tensor, number: int) -> Sample:
    return inputs[number], targets[number]


def transformed(samples: Samples, steps: Sequence[Step]) -> Samples:
    """Another data set, each step applied to its input tensor in turn."""
    return Samples(len(samples), partial(_stepped, samples, steps), samples.file, samples.classes)


def _stepped(samples: Samples, steps: Sequence[Step], number: int) -> Sample:
    value, target = samples[number]
    if not isinstance(value, Tensor):
        raise TypeError(f"transforms take one input tensor, found {type(value).__name__}")
    for step in steps:
        value = step(value)
    return value, target


def unit_float(image: Tensor) -> Tensor:
    """A uint8 image as float32 in 0..1, of the same shape."""
    return image.to(torch.float32).div_(255)
