"""Shared by generated data sets: a generator for each sample, and sizes of the splits."""

from __future__ import annotations

import hashlib

import torch
from pydantic import Field

from hookrun.data.info import SPLITS, Split
from hookrun.data.tokens import PaddingArgs
from hookrun.errors import Problem, SpecError


def generator_of(name: str) -> torch.Generator:
    """The generator of that name, always in the same state."""
    # Hashed, because torch's CPU generator keeps only the low 32 bits of a seed.
    digest = hashlib.sha256(name.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))


class GeneratedTokensArgs(PaddingArgs):
    """Sizes of the splits; seed: of the samples, null: the experiment's."""

    train_size: int = Field(default=4096, ge=0, le=10**9)
    val_size: int = Field(default=512, ge=0, le=10**9)
    seed: int | None = Field(default=0, ge=0, lt=2**63)

    def size(self, split: Split) -> int:
        """The number of samples of a split. Raises SpecError where it has none."""
        count = self.train_size if split == "train" else self.val_size
        if count == 0:
            what = f"the split '{split}' has no samples"
            raise SpecError([Problem(f"data.args.{split}_size", what, f"set data.args.{split}_size")])
        return count

    def sizes(self) -> dict[Split, int | None]:
        """The number of samples of each split."""
        return {split: self.train_size if split == "train" else self.val_size for split in SPLITS}

    def stream(self, split: Split, seed: int) -> str:
        """The name of the split's generators."""
        return f"{seed if self.seed is None else self.seed}/{split}"
