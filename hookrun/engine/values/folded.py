"""The result of a fold at one module, and which of its samples a page shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hookrun.engine.html import Shown, View

SPLITS = ("", "train", "val")
"""The splits of samples by their numbers in `top.splits`; the first one: not known."""

MEAN = "mean"
COV = "cov"
QUANTILES = "quantiles"
COUNT = "count"
TOP = ("top.values", "top.samples", "top.positions", "top.splits")


@dataclass(frozen=True, slots=True)
class Top:
    """The largest values of each unit in descending order, at most one of a sample; each [units, n].

    values:    NaN where there are fewer samples
    samples:   their numbers
    positions: under `tokens` the position of the token; else the place among the elements of the unit
    splits:    the number of the sample's split in `SPLITS`
    """

    values: Tensor
    samples: Tensor
    positions: Tensor
    splits: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Folded(Shown):
    """The result of a fold at one module. With `by: label` each tensor has the labels as its first dimension.

    tensors: `mean`, `count` and so on, by their names in folds.safetensors
    labels:  None: without `by: label`
    at:      the quantiles that `quantiles` has
    places:  the sizes of the dimensions that `top.positions` numbers; None: they differed
    """

    tensors: Mapping[str, Tensor]
    labels: Sequence[int] | None = None
    at: Sequence[float] = ()
    places: Sequence[int] | None = None

    @property
    def mean(self) -> Tensor:
        """[channels] float64; of elements in the shape of one."""
        return self.tensors[MEAN]

    @property
    def cov(self) -> Tensor | None:
        """[channels, channels] float64, unbiased; None: it was not asked for."""
        return self.tensors.get(COV)

    @property
    def quantiles(self) -> Tensor | None:
        """[channels, q]; None: they were not asked for."""
        return self.tensors.get(QUANTILES)

    @property
    def count(self) -> Tensor:
        """How many values of each unit there were."""
        return self.tensors[COUNT]

    @property
    def top(self) -> Top | None:
        """The largest values; None: they were not asked for."""
        return Top(*(self.tensors[name] for name in TOP)) if TOP[0] in self.tensors else None

    def _view(self) -> View:
        rows = [[name, str(list(tensor.shape))] for name, tensor in self.tensors.items()]
        return View(f"fold of {int(self.count.sum()):,} values of each unit", ("", "shape"), rows)


def split_name(number: int) -> str:
    """The split of this number; ``""`` if it is not known."""
    return SPLITS[number] if 0 <= number < len(SPLITS) else ""


MOST_SHOWN = 12
"""Units of a module that the page shows with their samples, of which the run keeps pictures."""


def largest_units(fold: Folded, most: int = MOST_SHOWN) -> list[tuple[int, ...]]:
    """The indices of the units with the largest values, in their order; none without a top."""
    if fold.top is None:
        return []
    largest = fold.top.values[..., 0]
    values = largest.flatten().double().nan_to_num(-math.inf)
    order = values.sort(descending=True, stable=True).indices[:most]
    return [tuple(unit) for unit in torch.stack(torch.unravel_index(order, largest.shape), 1).tolist()]


def shown_samples(folds: Mapping[str, Mapping[str, Folded]]) -> set[tuple[str, int]]:
    """(split, sample) of what the page shows of folds."""
    found = set[tuple[str, int]]()
    for modules in folds.values():
        for fold in modules.values():
            for unit in largest_units(fold):
                samples, splits = (fold.tensors[name][unit].tolist() for name in (TOP[1], TOP[3]))
                found.update(zip(map(split_name, splits), samples, strict=True))
    return found
