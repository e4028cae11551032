"""Random token sequences, each repeated once: the second half can be predicted from the first (induction)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from pydantic import Field, model_validator

from hookrun.data.info import DataInfo, Split
from hookrun.data.samples import IGNORED, Samples
from hookrun.data.source import GeneratedTokensArgs, Source, generator_of
from hookrun.data.tokenizer import Words
from hookrun.data.tokens import MOST_LENGTH, TokenSamples, TokenSequence, next_tokens

START = 0
SPANS = ("first", "second")


class RepeatedTokensArgs(GeneratedTokensArgs):
    """Token 0 starts every sample; then come `half` different tokens, drawn for each sample, and the same again.

    vocab_size: how many tokens there are, token 0 included
    half:       [least, most] tokens of the sequence that is repeated
    predict:    second_half: the targets are the tokens of the repetition that can be predicted; all: every next token,
                also those of the first half, which cannot be predicted
    """

    vocab_size: int = Field(default=64, ge=3, le=2**20)
    half: list[int] = Field(default=[8, 24], min_length=2, max_length=2)
    predict: Literal["second_half", "all"] = "second_half"

    @model_validator(mode="after")
    def _halves_fit(self) -> RepeatedTokensArgs:
        least, most = self.half
        if not 2 <= least <= most <= MOST_LENGTH // 2 - 1:
            raise ValueError(f"`half` is [{least}, {most}], expected [least, most] with 2 <= least <= most")
        if most >= self.vocab_size:
            raise ValueError(
                f"{most} different tokens do not fit into vocab_size {self.vocab_size}, of which one is the start"
            )
        return self


class RepeatedTokens(Source[RepeatedTokensArgs]):
    """Within a half no token comes twice, so that each token of the second half but the first is certain."""

    args = RepeatedTokensArgs

    def inspect(self, root: Path | None, args: RepeatedTokensArgs, split: Split) -> DataInfo:
        args.size(split)
        return args.layout(1 + 2 * args.half[1]).describe(self.name, args.sizes(), _words(args), SPANS)

    def open(self, root: Path | None, args: RepeatedTokensArgs, split: Split, seed: int) -> Samples:
        return _Repeated(args, split, seed)


class _Repeated(TokenSamples):
    def __init__(self, args: RepeatedTokensArgs, split: Split, seed: int) -> None:
        super().__init__(args.layout(1 + 2 * args.half[1]), SPANS)
        self._args = args
        self._size = args.size(split)
        self._stream = args.stream(split, seed)

    def __len__(self) -> int:
        return self._size

    def sequence(self, number: int) -> TokenSequence:
        generator = generator_of(f"{self._stream}/{number}")
        least, most = self._args.half
        count = int(torch.randint(least, most + 1, (), generator=generator))
        half = 1 + torch.randperm(self._args.vocab_size - 1, generator=generator)[:count]
        ids = torch.cat([torch.tensor([START]), half, half])
        targets = next_tokens(ids)
        if self._args.predict == "second_half":
            targets[: count + 1] = IGNORED  # where the repetition begins cannot be known
        spans = {"first": (1, 1 + count), "second": (1 + count, 1 + 2 * count)}
        return TokenSequence(ids, targets, spans=spans)


def _words(args: RepeatedTokensArgs) -> Words:
    return Words(("start", *(str(number) for number in range(1, args.vocab_size))))


REPEATED_TOKENS = RepeatedTokens("repeated_tokens")
