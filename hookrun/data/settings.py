"""The section `data` of an experiment."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from hookrun.engine.validation import FromRegistry

STACK = "stack"
LIST = "list"
"""The values of `data.collate` beside a user's own function."""


class Data(FromRegistry):
    """Which data: a name of the closed registry, its folder, transforms and batch size.

    factory:          function that returns the user's own data, for `name: python`
    transforms:       name -> arguments, applied in order
    train_transforms: used instead of `transforms` on the train split; null: the same
    batch_size:       samples of a batch; null: each sample is one call of the model, without a dimension of the batch
    collate:          how samples become a batch: `stack`, `list`, or a function of a trusted package
    """

    root: str | None = None
    transforms: dict[str, dict[str, Any] | None] = {}
    train_transforms: dict[str, dict[str, Any] | None] | None = None
    batch_size: int | None = Field(default=64, ge=1, le=2**20)
    collate: str = STACK
    workers: int = Field(default=0, ge=0, le=256)

    @property
    def unstacked(self) -> str:
        """The key that keeps the samples of a batch from being stacked; empty if they are, each tensor to [B, ...]."""
        if self.batch_size is None:
            return "data.batch_size"
        return "" if self.collate == STACK else "data.collate"

    @property
    def samples_of_batch(self) -> int:
        """The number of samples of a batch."""
        return self.batch_size or 1

    @property
    def has_own_collate(self) -> bool:
        """Whether a user's own function makes the batches."""
        return self.collate not in (STACK, LIST)
