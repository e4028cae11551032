"""Sums by position or by sample, beside the mean over all: `task.metrics: [{name: loss, by: position}]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class PartSums:
    """What one batch adds.

    keys:   [n] int64 on the CPU, each once: positions, or the numbers of samples
    sums:   [n] float64 on the CPU
    counts: [n] int64 on the CPU, how many values each sum is of
    """

    keys: Tensor
    sums: Tensor
    counts: Tensor


def by_position(values: Tensor, positions: Tensor) -> PartSums:
    """From a value [N] of each token and its position [N]."""
    return _grouped(values, positions)


def by_sample(values: Tensor, samples: Tensor, ids: Tensor) -> PartSums:
    """From a value [N] of each row and the place in the batch [N] of its sample, whose numbers are `ids` [B]."""
    found = _grouped(values, samples)
    return PartSums(ids[found.keys], found.sums, found.counts)


def _grouped(values: Tensor, keys: Tensor) -> PartSums:
    # On the CPU, where the order of the additions is always the same.
    values, keys = values.detach().cpu().to(torch.float64), keys.cpu()
    unique, places = keys.unique(return_inverse=True)
    sums = torch.zeros(len(unique), dtype=torch.float64).index_add_(0, places, values)
    return PartSums(unique, sums, torch.bincount(places, minlength=len(unique)))


class Parted:
    """The sums of one metric by position or by sample. What each batch adds is kept until it is read."""

    def __init__(self) -> None:
        self._added = list[PartSums]()

    def add(self, rows: PartSums) -> None:
        """A batch."""
        self._added.append(rows)
        if len(self._added) > _MOST_APART:
            self._added = [self.whole()]

    def include(self, other: Parted) -> None:
        """What another one has seen."""
        for rows in other._added:
            self.add(rows)

    def whole(self) -> PartSums:
        """Each key once, in rising order."""
        keys = _joined([each.keys for each in self._added], torch.int64)
        unique, places = keys.unique(return_inverse=True)
        sums, counts = (
            torch.zeros(len(unique), dtype=dtype).index_add_(0, places, _joined(given, dtype))
            for given, dtype in (
                ([each.sums for each in self._added], torch.float64),
                ([each.counts for each in self._added], torch.int64),
            )
        )
        return PartSums(unique, sums, counts)

    def state_dict(self) -> dict[str, Any]:
        """What was added so far, batch by batch: sums go on in the same order."""
        return {
            "sizes": [len(each.keys) for each in self._added],
            "keys": _joined([each.keys for each in self._added], torch.int64),
            "sums": _joined([each.sums for each in self._added], torch.float64),
            "counts": _joined([each.counts for each in self._added], torch.int64),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        columns = (state[name].split(state["sizes"]) for name in ("keys", "sums", "counts"))
        self._added = [PartSums(*each) for each in zip(*columns, strict=True)]


_MOST_APART = 4096
"""Batches whose rows are kept apart."""


def _joined(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(tensors) if tensors else torch.zeros(0, dtype=dtype)
