"""The description of a data set: shapes and dtypes of a sample, classes, sizes of the splits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from hookrun.errors import spec_error
from hookrun.spec.when import Scalar, typed

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hookrun.data.tokenizer import Tokenizer

Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = ("train", "val")
ALL = "all"
"""The value of `split` that means all splits, in the order of SPLITS."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of one sample; -1 stands for a size that differs between samples.

    fill: the value that examples are filled with
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: int = 0

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"

    def example(self, batch_size: int) -> Tensor:
        """Zeros, or what it is filled with, of shape [batch_size, *shape]."""
        import torch

        return torch.full((batch_size, *self.shape), self.fill, dtype=self.dtype)


InputsInfo = TensorInfo | Mapping[str, TensorInfo]


@dataclass(frozen=True, slots=True)
class DataInfo:
    """The description of a data set.

    inputs:      the sample after its transforms: one tensor, or several by name if the model takes keywords
    target:      None if the data has no target; its samples then have an empty tensor, which can be batched
    num_classes: the number of class labels; None if the target is not a label or their number is unknown
    sizes:       number of samples in each split; 0 if there is no such split, None if it is unknown before reading
    tokenizer:   for samples of tokens, whose targets are the next tokens; None for other samples
    spans:       names of the spans that samples of tokens may have
    has_wrong:   whether samples of tokens have a right and a wrong answer
    fields:      name -> the values, as `typed` has them, in a field of the data's own; None: not all are known
    remarks:     makes lines about the files of the data for the plan
    """

    name: str
    inputs: InputsInfo
    target: TensorInfo | None
    num_classes: int | None
    sizes: Mapping[Split, int | None]
    tokenizer: Tokenizer | None = None
    spans: tuple[str, ...] = ()
    has_wrong: bool = False
    fields: Mapping[str, Collection[tuple[bool, Scalar]] | None] = field(default_factory=dict)
    remarks: Callable[[], Iterator[str]] = tuple[str, ...]().__iter__

    @property
    def known_fields(self) -> dict[str, Collection[tuple[bool, Scalar]] | None]:
        """Name -> values of every field of a sample: where it comes from, its label, and the data's own fields."""
        known: dict[str, Collection[tuple[bool, Scalar]] | None] = {
            "sample": None,
            "file": None,
            "split": [typed(split) for split, size in self.sizes.items() if size != 0],
        }
        if self.target is not None and not self.target.shape and not self.target.dtype.is_floating_point:
            count = self.num_classes
            labels = None if count is None else range(count)
            known |= {
                "class": None if labels is None else [typed(str(label)) for label in labels],
                "label": None if labels is None else [*map(typed, labels)],
            }
        return {**known, **self.fields}

    @property
    def vocab_size(self) -> int | None:
        """The number of different tokens; None where the samples are something else."""
        return None if self.tokenizer is None else self.tokenizer.vocab_size

    @property
    def length(self) -> int | None:
        """The number of tokens in a sample, including padding; None if samples are not of tokens."""
        if self.tokenizer is None or isinstance(self.inputs, TensorInfo):
            return None
        return self.inputs["input_ids"].shape[0]

    @property
    def input(self) -> TensorInfo:
        """The one input tensor. Raises SpecError where the data gives several by name."""
        if isinstance(self.inputs, TensorInfo):
            return self.inputs
        raise spec_error(
            "data.args.input",
            f"one input tensor is needed here, and the data set '{self.name}' gives several: {', '.join(self.inputs)}",
            "name one of them in data.args.input",
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample's input tensor, without the batch. Raises SpecError as `input` does."""
        return self.input.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the input tensor. Raises SpecError as `input` does."""
        return self.input.dtype

    def example(self, batch_size: int) -> Tensor | dict[str, Tensor]:
        """A batch of inputs, all zeros: a tensor, or a dict of tensors where the inputs have names."""
        if isinstance(self.inputs, TensorInfo):
            return self.inputs.example(batch_size)
        return {name: info.example(batch_size) for name, info in self.inputs.items()}

    def example_target(self, batch_size: int) -> Tensor:
        """A batch of targets, all zeros; of shape [batch_size, 0] where the data has no target."""
        import torch

        return self.target.example(batch_size) if self.target else torch.zeros(batch_size, 0)
