"""Samples of token ids: padded to one length, with an attention mask, and the next token of each position as target."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hookrun.data.info import DataInfo, Split, TensorInfo
from hookrun.data.samples import IGNORED, Sample, Samples
from hookrun.data.source import Generated
from hookrun.data.tokenizer import Tokenizer
from hookrun.engine.spec.when import Scalar
from hookrun.engine.validation import Args

NO_SPAN = (-1, -1)
"""The first position and end of a span that a sample does not have."""

AMBIGUOUS = (-2, -2)
"""The same if the text of the span is there more than once: see `hookrun.engine.runtime.tokens.choice.TWICE`."""

MOST_LENGTH = 2**17


class PaddingArgs(Args):
    """How sequences of different lengths become one tensor.

    padding:      the side on which shorter sequences are padded; none: no padding, needs a batch size of 1
    position_ids: whether the model gets position_ids; null: only if the padding is on the left. The model `decoder`
                  computes them itself; models of transformers count padding too without them
    """

    padding: Literal["right", "left", "none"] = "right"
    position_ids: bool | None = None

    def layout(
        self, length: int, pad_id: int = 0, labels: int | None = None, *, answers: bool = False
    ) -> TokenLayout:
        """The layout of samples of at most `length` tokens.

        labels:  see `TokenLayout`
        answers: the labels are answers for an encoder-decoder, not the tokens of the sample
        """
        told = self.padding == "left" if self.position_ids is None else self.position_ids
        return TokenLayout(length, self.padding, pad_id, told, labels, "right" if answers else self.padding)


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One sample before it is padded.

    ids:     [n] int64
    targets: [n] int64: the target token at each position, or IGNORED
    labels:  the model's `labels`, if the layout has them
    spans:   name -> first position and end (excluded)
    wrong:   the token of the wrong answer; None: no wrong answer
    """

    ids: Tensor
    targets: Tensor
    labels: Tensor | None = None
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    wrong: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """The form of samples of tokens.

    length:       length of every sample, including padding; without padding that of the longest
    padding:      the side of the padding, or none
    pad_id:       the id of padding
    position_ids: whether the inputs have position_ids
    labels:       the length of the model's `labels`; None: it gets none
    labels_side:  the side on which labels are padded
    """

    length: int
    padding: str = "right"
    pad_id: int = 0
    position_ids: bool = False
    labels: int | None = None
    labels_side: str = "right"

    def describe(
        self,
        name: str,
        sizes: Mapping[Split, int | None],
        tokenizer: Tokenizer,
        spans: Sequence[str] = (),
        *,
        wrong: bool = False,
    ) -> DataInfo:
        """The description of a data set of such samples. wrong: they have a right and a wrong answer."""
        row = TensorInfo((self.length,), torch.int64)
        inputs = {"input_ids": row, "attention_mask": TensorInfo((self.length,), torch.int64, fill=1)}
        if self.position_ids:
            inputs["position_ids"] = row
        if self.labels is not None:
            inputs["labels"] = TensorInfo((self.labels,), torch.int64)
        return DataInfo(name, inputs, row, None, sizes, tokenizer, tuple(spans), wrong)

    def sample(self, sequence: TokenSequence) -> Sample:
        """The padded inputs by name, and the targets [length]."""
        mask = _filled(torch.ones_like(sequence.ids), 0, self.length, self.padding)
        inputs = {
            "input_ids": _filled(sequence.ids, self.pad_id, self.length, self.padding),
            "attention_mask": mask,
        }
        if self.position_ids:
            inputs["position_ids"] = (mask.cumsum(0) - 1).clamp(min=0)
        if self.labels is not None and sequence.labels is not None:
            inputs["labels"] = _filled(sequence.labels, IGNORED, self.labels, self.labels_side)
        return inputs, _filled(sequence.targets, IGNORED, self.length, self.padding)


def _filled(values: Tensor, fill: int, length: int, side: str) -> Tensor:
    if side == "none":
        return values
    missing = length - len(values)
    return torch.nn.functional.pad(values, (missing, 0) if side == "left" else (0, missing), value=fill)


class TokenSamples(Samples):
    """A data set of padded sequences.

    sequence:   number of a sample -> the sample, not longer than the layout's length
    span_names: of the spans that samples may have
    places:     file and line of each sample; empty: they are in no file
    fields:     the fields of each sample as a JSON object; empty: there are none
    """

    of_tokens: ClassVar[bool] = True

    def __init__(
        self,
        layout: TokenLayout,
        count: int,
        sequence: Callable[[int], TokenSequence],
        span_names: Sequence[str] = (),
        places: Sequence[str] = (),
        fields: Sequence[str] = (),
        field_names: Collection[str] = (),
    ) -> None:
        super().__init__(count, partial(_padded, layout, sequence), places.__getitem__ if places else None)
        self._sequence = sequence
        self._span_names = tuple(span_names)
        self._fields = fields
        self.field_names = field_names

    def fields(self, index: int) -> Mapping[str, Scalar]:
        return dict(json.loads(self._fields[index])) if self._fields else {}

    def spans(self, ids: Tensor) -> Mapping[str, Tensor]:
        if not self._span_names:
            return {}
        spans = [self._sequence(number).spans for number in ids.tolist()]
        return {
            name: torch.tensor([each.get(name, NO_SPAN) for each in spans], dtype=torch.int64).reshape(-1, 2)
            for name in self._span_names
        }

    def wrong(self, ids: Tensor) -> Tensor | None:
        answers = [self._sequence(number).wrong for number in ids.tolist()]
        return None if None in answers else torch.tensor(answers, dtype=torch.int64)


def _padded(layout: TokenLayout, sequence: Callable[[int], TokenSequence], number: int) -> Sample:
    return layout.sample(sequence(number))


def next_tokens(ids: Tensor) -> Tensor:
    """[n] -> [n]: the token after each, and IGNORED at the last."""
    return torch.cat([ids[1:], torch.tensor([IGNORED])]) if len(ids) else ids


class GeneratedTokens(Generated, PaddingArgs):
    """Sequences of tokens that are drawn.

    spans:     names of the spans that each has
    has_wrong: whether each has a right and a wrong answer
    """

    spans: ClassVar[Sequence[str]]
    has_wrong: ClassVar[bool] = False

    @property
    @abstractmethod
    def longest(self) -> int:
        """The largest number of tokens in a sequence."""

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """What the token ids stand for."""

    @abstractmethod
    def draw(self, generator: torch.Generator) -> TokenSequence:
        """The sequence that this generator gives."""

    def inspect(self, root: Path | None, split: Split) -> DataInfo:
        self.size(split)
        return self.layout(self.longest).describe(
            self.name, self.sizes, self.tokenizer, self.spans, wrong=self.has_wrong
        )

    def open(self, root: Path | None, split: Split, seed: int) -> Samples:
        sequence = partial(self._sequence, split, seed)
        return TokenSamples(self.layout(self.longest), self.size(split), sequence, self.spans)

    def _sequence(self, split: Split, seed: int, number: int) -> TokenSequence:
        return self.draw(self.generator(split, seed, number))
