"""Random token sequences, each repeated once: the second half can be predicted from the first (induction)."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator

from hookrun.data.samples import IGNORED
from hookrun.data.tokenizer import Words
from hookrun.data.tokens import MOST_LENGTH, GeneratedTokens, TokenSequence, next_tokens

START = 0


class RepeatedTokens(GeneratedTokens):
    """Token 0 starts every sample; then come `half` different tokens, drawn for each sample, and the same again.

    Within a half no token comes twice, so that each token of the second half but the first is certain.

    vocab_size: how many tokens there are, token 0 included
    half:       [least, most] tokens of the sequence that is repeated
    predict:    second_half: the targets are the tokens of the repetition that can be predicted; all: every next token,
                also those of the first half, which cannot be predicted
    """

    name = "repeated_tokens"
    spans = ("first", "second")
    vocab_size: int = Field(default=64, ge=3, le=2**20)
    half: list[int] = Field(default=[8, 24], min_length=2, max_length=2)
    predict: Literal["second_half", "all"] = "second_half"

    @model_validator(mode="after")
    def _halves_fit(self) -> RepeatedTokens:
        least, most = self.half
        if not 2 <= least <= most <= MOST_LENGTH // 2 - 1:
            raise ValueError(f"`half` is [{least}, {most}], expected [least, most] with 2 <= least <= most")
        if most >= self.vocab_size:
            raise ValueError(
                f"{most} different tokens do not fit into vocab_size {self.vocab_size}, of which one is the start"
            )
        return self

    @property
    def longest(self) -> int:
        return 1 + 2 * self.half[1]

    @property
    def tokenizer(self) -> Words:
        return Words(("start", *map(str, range(1, self.vocab_size))))

    def draw(self, generator: torch.Generator) -> TokenSequence:
        least, most = self.half
        count = int(torch.randint(least, most + 1, (), generator=generator))
        half = 1 + torch.randperm(self.vocab_size - 1, generator=generator)[:count]
        ids = torch.cat([torch.tensor([START]), half, half])
        targets = next_tokens(ids)
        if self.predict == "second_half":
            targets[: count + 1] = IGNORED  # where the repetition begins cannot be known
        spans = {"first": (1, 1 + count), "second": (1 + count, 1 + 2 * count)}
        return TokenSequence(ids, targets, spans=spans)
