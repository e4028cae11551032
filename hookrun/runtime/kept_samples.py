"""The samples of a data set that a hook keeps: the same at all its modules, in every epoch and in every run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

from hookrun.actions.tensors import holds_data
from hookrun.errors import HookError
from hookrun.runtime.clock import Clock

if TYPE_CHECKING:
    from hookrun.actions.fields import Keep


class KeptSamples:
    """Every n-th sample (`every`), or k samples drawn uniformly without replacement beforehand (`reservoir`).

    where: the hook and its module, for messages
    """

    def __init__(self, keep: Keep, clock: Clock, seed: int, where: str) -> None:
        self._keep = keep
        self._clock = clock
        self._seed = seed
        self._where = where
        self._drawn = dict[int, Tensor]()

    def rows(self, shape: Sequence[int]) -> Tensor:
        """[k] int64: the rows of the chosen samples in a tensor of this shape.

        Raises HookError if the tensor does not have a row for each sample of the batch, or samples are not known.
        """
        samples = self._samples()
        if not shape or shape[0] != len(samples):
            raise self._error(f"sees a tensor of shape {list(shape)} in a batch of {len(samples)}")
        return self._is_chosen(samples).nonzero().squeeze(1)

    def is_kept(self) -> Tensor:
        """[B] bool: which samples of the current batch are chosen."""
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
            raise self._error(
                "does not know how many there are: set hooks.population to the number of samples"
            )
        if (drawn := self._drawn.get(population)) is None:
            order = torch.randperm(population, generator=Generator().manual_seed(self._seed))
            drawn = torch.zeros(population, dtype=torch.bool).index_fill_(
                0, order[: self._keep.reservoir], True
            )
            if holds_data(drawn):
                self._drawn[population] = drawn
        return drawn[samples]

    def _error(self, what: str) -> HookError:
        return HookError(f"{self._where}: it keeps only some samples and {what}")
