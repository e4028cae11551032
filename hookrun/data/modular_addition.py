"""Sums of two numbers modulo a third, every pair once, as used to study grokking (Power et al. 2022)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from hookrun.data.info import DataInfo, Split
from hookrun.data.samples import IGNORED, Samples
from hookrun.data.source import Source, part_of, val_count
from hookrun.data.tokenizer import Words
from hookrun.data.tokens import PaddingArgs, TokenSamples, TokenSequence
from hookrun.errors import spec_error

LENGTH = 4
SPANS = {"a": (0, 1), "b": (2, 3)}


class ModularAddition(Source, PaddingArgs):
    """`a + b =`, four tokens, with the target (a + b) mod `modulus` at the last; a number is its own id.

    modulus:      the numbers are below it
    val_fraction: the fixed fraction of all pairs that is for validation
    """

    name = "modular_addition"
    modulus: int = Field(default=113, ge=2, le=1000)
    val_fraction: float = Field(default=0.7, ge=0, le=1)

    def inspect(self, root: Path | None, split: Split) -> DataInfo:
        held_out = val_count(self.modulus**2, self.val_fraction)
        sizes: dict[Split, int | None] = {"train": self.modulus**2 - held_out, "val": held_out}
        if sizes[split] == 0:
            raise spec_error(
                "data.args.val_fraction",
                f"no pair is for the split '{split}' (val_fraction {self.val_fraction})",
                "set it between 0 and 1",
            )
        words = Words((*map(str, range(self.modulus)), "+", "="))
        return self.layout(LENGTH).describe(self.name, sizes, words, list(SPANS))

    def open(self, root: Path | None, split: Split, seed: int) -> Samples:
        self.inspect(root, split)
        pairs = torch.tensor(part_of(self.modulus**2, self.val_fraction, split))
        return TokenSamples(self.layout(LENGTH), len(pairs), partial(self._sum, pairs), list(SPANS))

    def _sum(self, pairs: Tensor, number: int) -> TokenSequence:
        a, b = divmod(int(pairs[number]), self.modulus)
        ids = torch.tensor([a, self.modulus, b, self.modulus + 1])
        targets = torch.tensor([IGNORED, IGNORED, IGNORED, (a + b) % self.modulus])
        return TokenSequence(ids, targets, spans=SPANS)
