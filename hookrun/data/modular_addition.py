"""Sums of two numbers modulo a third, every pair once, as used to study grokking (Power et al. 2022)."""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import Field

from hookrun.data.info import SPLITS, DataInfo, Split
from hookrun.data.samples import IGNORED, Samples
from hookrun.data.source import Source, split_indices, val_count
from hookrun.data.tokenizer import Words
from hookrun.data.tokens import PaddingArgs, TokenSamples, TokenSequence
from hookrun.errors import Problem, SpecError

LENGTH = 4
_SIGNS = ("+", "=")
SPANS = {"a": (0, 1), "b": (2, 3)}


class ModularAdditionArgs(PaddingArgs):
    """Which pairs.

    modulus:      the numbers are below it
    val_fraction: the fixed fraction of all pairs that is for validation
    """

    modulus: int = Field(default=113, ge=2, le=1000)
    val_fraction: float = Field(default=0.7, ge=0, le=1)

    def sizes(self) -> dict[Split, int | None]:
        """The number of pairs in each split."""
        total = self.modulus**2
        held_out = val_count(total, self.val_fraction)
        return {split: held_out if split == "val" else total - held_out for split in SPLITS}


class ModularAddition(Source[ModularAdditionArgs]):
    """`a + b =`, four tokens, with the target (a + b) mod `modulus` at the last; a number is its own id."""

    args = ModularAdditionArgs

    def inspect(self, root: Path | None, args: ModularAdditionArgs, split: Split) -> DataInfo:
        sizes = args.sizes()
        if sizes[split] == 0:
            what = f"no pair is for the split '{split}' (val_fraction {args.val_fraction})"
            raise SpecError([Problem("data.args.val_fraction", what, "set it between 0 and 1")])
        return args.layout(LENGTH).describe(self.name, sizes, _words(args), list(SPANS))

    def open(self, root: Path | None, args: ModularAdditionArgs, split: Split, seed: int) -> Samples:
        self.inspect(root, args, split)
        return _Sums(args, split)


class _Sums(TokenSamples):
    def __init__(self, args: ModularAdditionArgs, split: Split) -> None:
        super().__init__(args.layout(LENGTH), list(SPANS))
        self._modulus = args.modulus
        train, val = split_indices(args.modulus**2, args.val_fraction)
        self._pairs = torch.tensor(train if split == "train" else val)

    def __len__(self) -> int:
        return len(self._pairs)

    def sequence(self, number: int) -> TokenSequence:
        a, b = divmod(int(self._pairs[number]), self._modulus)
        ids = torch.tensor([a, self._modulus, b, self._modulus + 1])
        targets = torch.tensor([IGNORED, IGNORED, IGNORED, (a + b) % self._modulus])
        return TokenSequence(ids, targets, spans=SPANS)


def _words(args: ModularAdditionArgs) -> Words:
    return Words((*(str(number) for number in range(args.modulus)), *_SIGNS))


MODULAR_ADDITION = ModularAddition("modular_addition")
