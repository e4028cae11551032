"""What a fold accumulates of the rows that a hook sees: moments, largest values and quantiles of units.

A unit is a channel or an element of a row. The numbers of R rows of U units, each at P places, come as [R, U, P]. What
has been accumulated, of a few rows or of all, is one mapping, and `_merged` puts two of them together:

    count:     how many values of each unit
    sum:       [U] float64
    products:  [U, U] float64, of the deviations of each two units; with `cov` only
    top:       values, keys and positions of the largest, each [U, n]; with `top` only
    waiting:   what may be among the largest and is not sorted in yet; never in a state
    levels, collapses: those of a Sketch; with `quantiles` only

Its tensors are on the device of the values, and are replaced and never changed: a saved state can hold them as they
are. On an accelerator nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookrun.engine.values import largest
from hookrun.engine.values.containers import rebuild
from hookrun.engine.values.folded import COUNT, COV, MEAN, QUANTILES, SPLITS, TOP, Folded
from hookrun.engine.values.sketch import HALF, Sketch
from hookrun.engine.values.tensors import in_numpy, on_device

MOST_BYTES = 2**29
"""What a fold may hold at one module, all its labels together."""

MOST_LABELS = 1000

_BLOCK = 2**22
"""Elements whose deviations from their mean are computed at a time."""

Sums = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SeenRows:
    """Rows with their samples.

    values:    [R, U, P] floating point
    keys:      [R] int64 on the CPU, the sample of each row with its split
    positions: [R] int64 on the CPU, the position of each row; None: that of a value is its place, 0 to P - 1
    """

    values: Tensor
    keys: Tensor
    positions: Tensor | None = None

    def at(self, rows: Tensor) -> SeenRows:
        """Some of the rows. rows: their indices, [k] int64 on the CPU"""
        positions = None if self.positions is None else self.positions[rows]
        values = self.values[on_device(rows, self.values.device)]
        return SeenRows(values, self.keys[rows], positions)


def keys_of(samples: Tensor, split: str | None) -> Tensor:
    """[R] int64: one number for each sample of each split, in the order of the samples."""
    return torch.from_numpy(samples.numpy() * len(SPLITS) + SPLITS.index(split or ""))


def _total(values: Tensor) -> Tensor:
    """[U], the sum of rows [R, U, P] in float64."""
    if not values.is_cpu:
        return values.double().sum((0, 2))
    with np.errstate(invalid="ignore"):  # inf - inf
        # a few at a time are converted, which stay in the cache
        return torch.from_numpy(np.add.reduce(in_numpy(values), (0, 2), np.float64))


def _blocks(values: Tensor) -> Sequence[Tensor]:
    """Rows whose copies in float64 do not take too much memory."""
    size = max(_BLOCK // prod(values.shape[1:]), 1)
    return values.split(size) if len(values) > size else [values]


def _moments(values: Tensor, *, has_products: bool) -> Sums:
    """Count, sum and products of rows."""
    count = len(values) * values.shape[2]
    total = _total(values)
    moments: dict[str, Any] = {"count": count, "sum": total}
    if has_products:
        apart = values.double().movedim(1, 0).flatten(1)
        apart = apart - total[:, None] / count
        moments["products"] = apart @ apart.T
    return moments


def _merged_moments(one: Sums, other: Sums) -> dict[str, Any]:
    """Those of both parts, by the formula of Chan, Golub and LeVeque (1979): a large mean does not cancel anything."""
    count = one["count"] + other["count"]
    merged = {"count": count, "sum": one["sum"] + other["sum"]}
    if "products" in one:
        apart = other["sum"] / other["count"] - one["sum"] / max(one["count"], 1)
        weight = one["count"] * other["count"] / count
        merged["products"] = one["products"] + other["products"] + weight * apart.outer(apart)
    return merged


def _merged(one: Sums, other: Sums) -> Sums:
    """What both have accumulated together, of which nothing waits."""
    sums = _merged_moments(one, other)
    if "top" in one:
        sums["top"] = largest.merged(one["top"], other["top"])
    if "levels" in one:
        sums |= _merged_levels(one, other["levels"])
    return sums


def _merged_levels(one: Sums, levels: Sequence[Tensor]) -> dict[str, Any]:
    """A sketch with the values of the levels of another one."""
    sketch = Sketch(list(one["levels"]), list(one["collapses"]))
    for level, values in enumerate(levels):
        sketch.add(level, values)
    return {"levels": sketch.levels, "collapses": sketch.collapses}


def _settled(sums: Sums) -> Sums:
    """The same, of which nothing waits."""
    settled = dict(sums)
    waiting = settled.pop("waiting", None)
    if waiting is not None and waiting.count:
        settled["top"] = largest.settled(settled["top"], [waiting.filled()])
    return settled


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is accumulated beside the mean: the covariance, so many of the largest values, quantiles."""

    cov: bool = False
    top: int = 0
    at: tuple[float, ...] = ()

    def size(self, units: int) -> int:
        """The bytes that it takes for so many units; of quantiles those of ten levels, of `top` without what waits."""
        sketch = 4 * HALF * 12 if self.at else 0
        products = 8 * units if self.cov else 0
        return units * (8 + 24 * self.top + sketch + products)


def most_labels(size: int) -> int:
    """How many labels can be held, if one takes so many bytes."""
    return min(MOST_LABELS, MOST_BYTES // size)


def labels_refused(count: int, units: int, size: int) -> str:
    """Why so many labels, each of so many units and bytes, cannot be held; ``""``: they can."""
    if count <= most_labels(size):
        return ""
    return (
        f"{count:,} labels of {units:,} units take {count * size:,} bytes, at most {MOST_LABELS:,} labels and "
        f"{MOST_BYTES:,} bytes are held: select some units by `index`, or ask for less in `of`"
    )


def _nothing(wanted: Wanted, values: Tensor) -> Sums:
    """Before the first row. values: [R, U, P], such as it will have"""
    units = values.shape[1]
    sums: dict[str, Any] = {"count": 0, "sum": values.new_zeros(units, dtype=torch.float64)}
    if wanted.cov:
        sums["products"] = values.new_zeros((units, units), dtype=torch.float64)
    if wanted.top:
        sums["top"] = largest.none_of(values, wanted.top)
    if wanted.at:
        sums |= {"levels": [], "collapses": []}
    return sums


def _with_rows(before: Sums, seen: SeenRows) -> Sums:
    """What there is, with that of more rows."""
    values = seen.values
    sums = dict(before)
    has_products = "products" in before
    for rows in _blocks(values):
        sums |= _merged_moments(sums, _moments(rows, has_products=has_products))
    if "top" in before:
        waiting = before.get("waiting")
        top, waiting = largest.with_rows(before["top"], waiting, values, seen.keys, seen.positions)
        sums |= {"top": top, "waiting": waiting}
    if "levels" in before:
        flat = values.movedim(1, 0).flatten(1)
        if flat.dtype is not torch.float64:
            flat = flat.float()
        sums |= _merged_levels(before, [flat])
    return sums


class Folding:
    """What one fold has accumulated at one module, for each label by itself; without labels under ``""``.

    units:  the sizes of the dimensions of units: [C], or those of an element
    places: the sizes of the others beside that of rows; None: they have differed
    rows:   how many it has seen whose samples nobody has numbered
    sums:   label -> what it has accumulated
    """

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.units: list[int] | None = None
        self.places: list[int] | None = None
        self.rows = 0
        self.sums: dict[str, Sums] = {}
        self._lock = Lock()

    def add(
        self, seen: SeenRows, units: Sequence[int], places: Sequence[int], labels: Tensor | None = None
    ) -> None:
        """Add rows, whose values have these units and places. labels: [R] int64 on the CPU.

        ValueError if the units are others than before, or if there are too many labels.
        """
        with self._lock, torch.no_grad():
            self._note(list(units), list(places))
            if labels is None:
                self._add("", seen)
                return
            for label in labels.unique().tolist():
                rows = (labels == label).nonzero().squeeze(1)
                self._add(str(label), seen.at(rows))

    def _note(self, units: list[int], places: list[int] | None) -> None:
        if self.units is None:
            self.units = units
            self.places = places
        if self.units != units:
            raise ValueError(f"the value has units {units}, and had {self.units} before")
        if self.places != places:
            self.places = None

    def _add(self, label: str, seen: SeenRows) -> None:
        before = self._before(label, seen.values)
        self.sums[label] = _with_rows(before, seen)

    def _before(self, label: str, values: Tensor) -> Sums:
        """What the label has accumulated, on the device of the values."""
        if label in self.sums:
            sums = self.sums[label]
            if sums["sum"].device == values.device:
                return sums
            # those of a resumed run come from the CPU
            return rebuild(_settled(sums), lambda x: x.to(values.device) if isinstance(x, Tensor) else x)
        units = values.shape[1]
        too_many = labels_refused(len(self.sums) + 1, units, self.wanted.size(units))
        if label and too_many:
            raise ValueError(f"by: label: {too_many}")
        return _nothing(self.wanted, values)

    def state_dict(self) -> dict[str, Any]:
        """All of it as plain values and tensors."""
        sums = {label: _settled(of_label) for label, of_label in self.sums.items()}
        return {"units": self.units, "places": self.places, "rows": self.rows, "sums": sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add what a state has accumulated, of other rows of the same module."""
        if state["units"] is None:
            return
        self._note(state["units"], state["places"])
        self.rows += state["rows"]
        for label, sums in state["sums"].items():
            before = self.sums.get(label)
            self.sums[label] = sums if before is None else _merged(_settled(before), sums)

    def result(self) -> Folded | None:
        """What it has found, on the CPU; None before the first row."""
        if self.units is None:
            return None
        labels = None if "" in self.sums else sorted(map(int, self.sums))
        groups = [self._of_label(str(label)) for label in labels or ()] or [self._of_label("")]
        tensors: dict[str, Tensor] = {}
        for name in groups[0]:
            found = torch.stack([group[name].cpu() for group in groups])
            tensors[name] = found[0] if labels is None else found
        return Folded(tensors, labels, self.wanted.at, self.places)

    def _of_label(self, label: str) -> dict[str, Tensor]:
        """The result of a label: name -> tensor."""
        assert self.units is not None
        sums = _settled(self.sums[label])
        count = sums["count"]
        found = {MEAN: sums["sum"] / count}
        if "top" in sums:
            values, keys, positions = sums["top"]
            is_empty = largest.is_empty(keys)
            columns = (values, keys // len(SPLITS), positions, keys % len(SPLITS))
            for name, column, fill in zip(TOP, columns, (math.nan, -1, -1, 0), strict=True):
                found[name] = column.masked_fill(is_empty, fill)
        if "levels" in sums:
            found[QUANTILES] = Sketch(sums["levels"], sums["collapses"]).quantiles(self.wanted.at)
        found = {name: tensor.unflatten(0, self.units) for name, tensor in found.items()}
        if "products" in sums:
            found[COV] = sums["products"] / (count - 1)
        return {**found, COUNT: torch.tensor(count)}
