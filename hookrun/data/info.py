"""The description of a data set: shapes and dtypes of a sample, classes, sizes of the splits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from hookrun.engine.spec.when import Scalar, typed
from hookrun.errors import spec_error

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hookrun.data.samples import Samples
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
        """Zeros, or what it is filled with, of shape [batch_size, *shape]; 64 for a size that differs."""
        import torch

        sizes = [64 if size == -1 else size for size in self.shape]
        return torch.full((batch_size, *sizes), self.fill, dtype=self.dtype)


InputsInfo = TensorInfo | Mapping[str, TensorInfo]


@dataclass(frozen=True, slots=True)
class DataInfo:
    """The description of a data set.

    inputs:      the sample after its transforms: one tensor, or several by name if the model takes keywords; no names
                 if it is anything else
    target:      None if the data has no target, or none that is a tensor. Of a batch that a user's own function makes:
                 the part of it that belongs to a sample, with the first size -1 if that is not one row
    num_classes: the number of class labels; None if the target is not a label or their number is unknown
    sizes:       number of samples in each split; 0 if there is no such split, None if it is unknown before reading
    tokenizer:   for samples of tokens, whose targets are the next tokens; None for other samples
    spans:       names of the spans that samples of tokens may have
    has_wrong:   whether samples of tokens have a right and a wrong answer
    fields:      name -> the values, as `typed` has them, in a field of the data's own; None: not all are known
    samples:     of a user's own data, which alone shows its form; None: zeros stand for samples
    collated:    count -> inputs and targets of a batch; None: the samples are stacked
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
    samples: Samples | None = None
    collated: Callable[[int], tuple[Any, Any]] | None = None
    remarks: Callable[[], Iterator[str]] = tuple[str, ...]().__iter__

    @property
    def known_fields(self) -> dict[str, Collection[tuple[bool, Scalar]] | None]:
        """Name -> values of every field of a sample: where it comes from, its label, and the data's own fields."""
        fields: dict[str, Collection[tuple[bool, Scalar]] | None] = {
            "sample": None,
            "file": None,
            "split": [typed(split) for split, size in self.sizes.items() if size != 0],
        }
        if self.target is not None and not self.target.shape and not self.target.dtype.is_floating_point:
            fields["class"] = fields["label"] = None
            if self.num_classes is not None:
                fields["class"] = [typed(str(label)) for label in range(self.num_classes)]
                fields["label"] = [typed(label) for label in range(self.num_classes)]
        return {**fields, **self.fields}

    @property
    def has_target_of_sample(self) -> bool:
        """Whether row i of a batch's targets is that of sample i; stacked samples without a target have empty rows."""
        return self.collated is None or (self.target is not None and self.target.shape[:1] != (-1,))

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
        several = f"several: {', '.join(self.inputs)}" if self.inputs else "something else"
        what = f"one input tensor is needed here, and the data set '{self.name}' gives {several}"
        raise spec_error("data.args.input", what, "name one of them in data.args.input")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample's input tensor, without the batch. Raises SpecError as `input` does."""
        return self.input.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the input tensor. Raises SpecError as `input` does."""
        return self.input.dtype

    def example_of(self, count: int) -> tuple[Any, Any]:
        """Inputs and targets of a batch of `count` samples, made as the batches of a run are; see `Data.collate`.

        Inputs are a tensor, or a dict of tensors where they have names; targets [count, 0] where the data has none.
        Both may be anything else where they are not stacked. Samples that are not batched: the first one alone.

        Raises HookrunError if the samples cannot be a batch.
        """
        if self.collated is not None:
            return self.collated(count)
        import torch

        targets = self.target.example(count) if self.target else torch.zeros(count, 0)
        if isinstance(self.inputs, TensorInfo):
            return self.inputs.example(count), targets
        return {name: info.example(count) for name, info in self.inputs.items()}, targets

    def example(self, count: int) -> Any:
        """The inputs of `example_of`."""
        return self.example_of(count)[0]

    def example_target(self, count: int) -> Any:
        """The targets of `example_of`."""
        return self.example_of(count)[1]
