"""Sums of metrics by position or by sample: `task.metrics: [{name: loss, by: position}]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class PartSums:
    """Sums of a metric's values by key, for one batch or several.

    keys:   [n] int64 on the CPU, each once: positions, or the numbers of samples
    sums:   [n] float64 on the CPU
    counts: [n] int64 on the CPU, the number of values in each sum
    """

    keys: Tensor
    sums: Tensor
    counts: Tensor


def by_position(values: Tensor, positions: Tensor) -> PartSums:
    """The sums by position, from the value [N] of each token and its position [N]."""
    return _grouped(values, positions)


def by_sample(values: Tensor, samples: Tensor, ids: Tensor) -> PartSums:
    """The sums by sample number.

    values:  [N], the value of each row
    samples: [N], the index of each row's sample in the batch
    ids:     [B], the numbers of the samples in the batch
    """
    found = _grouped(values, samples)
    return PartSums(ids[found.keys], found.sums, found.counts)


def _grouped(values: Tensor, keys: Tensor) -> PartSums:
    # On the CPU the order of the additions is always the same.
    values, keys = values.detach().cpu().to(torch.float64), keys.cpu()
    unique, places = keys.unique(return_inverse=True)
    sums = torch.zeros(len(unique), dtype=torch.float64).index_add_(0, places, values)
    return PartSums(unique, sums, torch.bincount(places, minlength=len(unique)))


class PartAccumulator:
    """The sums of one metric by position or by sample. The sums of each batch are kept until they are read."""

    def __init__(self) -> None:
        self._added = list[PartSums]()

    def add(self, rows: PartSums) -> None:
        """Add the sums of a batch."""
        self._added.append(rows)
        if len(self._added) > _MOST_SEPARATE:
            self._added = [self.whole()]

    def include(self, other: PartAccumulator) -> None:
        """Add the sums of another PartAccumulator."""
        for rows in other._added:
            self.add(rows)

    def whole(self) -> PartSums:
        """The total of all batches, each key once, in ascending order."""
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
        """The sums of each batch so far, kept separate so that the order of later additions stays the same."""
        return {
            "sizes": [len(each.keys) for each in self._added],
            "keys": _joined([each.keys for each in self._added], torch.int64),
            "sums": _joined([each.sums for each in self._added], torch.float64),
            "counts": _joined([each.counts for each in self._added], torch.int64),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the sums by saved ones."""
        columns = (state[name].split(state["sizes"]) for name in ("keys", "sums", "counts"))
        self._added = [PartSums(*each) for each in zip(*columns, strict=True)]


_MOST_SEPARATE = 4096
"""The largest number of batches whose sums are kept separately; then they are added up."""


def _joined(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(tensors) if tensors else torch.zeros(0, dtype=dtype)
