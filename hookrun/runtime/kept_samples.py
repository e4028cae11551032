"""Which samples of a data set a hook keeps: the same at all its modules, in every epoch and in every run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

from hookrun.actions.tensors import holds_data
from hookrun.errors import HookError
from hookrun.runtime.clock import Clock

if TYPE_CHECKING:
    from hookrun.actions.keep import Keep


class KeptSamples:
    """Every n-th sample, or so many of all that are drawn beforehand, each set of them as likely as any other.

    where: the hook and its module, for messages
    """

    def __init__(self, keep: Keep, clock: Clock, seed: int, where: str) -> None:
        self._keep = keep
        self._clock = clock
        self._seed = seed
        self._where = where
        self._drawn = dict[int, Tensor]()

    def rows(self, shape: Sequence[int]) -> Tensor:
        """The places [k] int64 of the chosen samples in the batch under way, for a tensor of that shape."""
        samples = self._samples()
        if not shape or shape[0] != len(samples):
            raise self._error(f"sees a tensor of shape {list(shape)} in a batch of {len(samples)}")
        return self._is_chosen(samples).nonzero().squeeze(1)

    def is_kept(self) -> Tensor:
        """[B] bool: which samples of the batch under way are chosen."""
        return self._is_chosen(self._samples())

    def _samples(self) -> Tensor:
        samples = self._clock.samples
        if samples is None:
            raise self._error("does not know which samples these are: set hooks.samples before each batch")
        return samples

    def _is_chosen(self, samples: Tensor) -> Tensor:
        if self._keep.every is not None:
            return samples % self._keep.every == 0
        population = self._clock.population
        if population is None:
            raise self._error("does not know out of how many: set hooks.population to the number of samples")
        if (drawn := self._drawn.get(population)) is None:
            order = torch.randperm(population, generator=Generator().manual_seed(self._seed))
            drawn = torch.zeros(population, dtype=torch.bool).index_fill_(
                0, order[: self._keep.reservoir], True
            )
            if holds_data(drawn):
                self._drawn[population] = drawn
        return drawn[samples]

    def _error(self, what: str) -> HookError:
        return HookError(f"{self._where}: it keeps some of the samples and {what}")
