"""Quantiles of many values from few of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

HALF = 1024
"""Values that a collapse of a sketch keeps: half of what it sorts."""


@dataclass(slots=True)
class Sketch:
    """Quantiles of each unit from few values, after Munro and Paterson (1980): always the same for the same values.

    A value of level i stands for 2^i. When a level has 2048 values, they are sorted and every second one goes to the
    next level: the first, third, … and the next time the second, fourth, …. Sorting 2k values of weight w so moves a
    rank by at most w, every other time up and otherwise down. n values collapse n / (2k w) times at a level, which has
    log2(n / k) of them: a quantile lies within log2(n / 1024) / 4096 of its rank, in the worst order of values:
    0.25 % after a million values of a unit, 0.5 % after a thousand million. Up to 2047 values it is exact.

    levels:    the values [U, n] of each level
    collapses: how often each level was sorted
    """

    levels: list[Tensor]
    collapses: list[int]

    def add(self, level: int, values: Tensor) -> None:
        """Add values [U, n] to a level."""
        if level == len(self.levels):
            self.levels.append(values[:, :0])
            self.collapses.append(0)
        values = torch.cat([self.levels[level], values], 1)
        count = values.shape[1] // (2 * HALF)
        full = count * 2 * HALF
        self.levels[level] = values[:, full:].clone()  # not a view, which would hold the rest
        if not count:
            return
        pairs = values[:, :full].unflatten(1, (count, 2 * HALF)).sort(2).values.unflatten(2, (HALF, 2))
        kept = pairs[..., 0].clone()
        odd = 1 - self.collapses[level] % 2
        kept[:, odd::2] = pairs[:, odd::2, :, 1]
        largest = pairs[:, :, -1, 1]
        kept[:, :, -1] = largest.where(largest.isnan(), kept[:, :, -1])  # a NaN stays
        self.collapses[level] += count
        self.add(level + 1, kept.flatten(1))

    def quantiles(self, at: Sequence[float]) -> Tensor:
        """[U, q], interpolated as by torch.quantile; NaN where a unit has one."""
        weights = [
            torch.full_like(kept[0], 2**level, dtype=torch.int64) for level, kept in enumerate(self.levels)
        ]
        values, order = torch.cat(self.levels, 1).sort(1)
        ends = torch.cat(weights)[order].cumsum(1)
        places = torch.tensor(at, dtype=torch.float64, device=ends.device) * (ends[:, -1:] - 1)
        below = values.gather(1, torch.searchsorted(ends, places.floor().long(), right=True))
        above = values.gather(1, torch.searchsorted(ends, places.ceil().long(), right=True))
        found = below.lerp(above, places.frac().to(below.dtype))
        return found.masked_fill(values[:, -1:].isnan(), math.nan)
