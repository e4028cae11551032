"""What a fold accumulates of the rows that a hook sees, and its result: moments, largest values and quantiles of units.

A unit is a channel or an element of a row. All numbers stay on the device of the values, and nothing waits for it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from hookrun.engine.html import Shown, View
from hookrun.engine.values.tensors import on_device

SPLITS = ("", "train", "val")
"""The splits of samples by their numbers in `top.splits`; the first one: not known."""

MEAN = "mean"
COV = "cov"
QUANTILES = "quantiles"
COUNT = "count"
TOP = ("top.values", "top.samples", "top.positions", "top.splits")

MOST_BYTES = 2**29
"""What a fold may hold at one module, all its labels together."""

MOST_LABELS = 1000

_NONE = 2**62
"""The key of a place that is still empty: greater than that of any sample."""

_BLOCK = 2**22
"""Elements of a part whose deviations are computed at a time."""

HALF = 1024
"""Values that a collapse of a sketch keeps: half of what it sorts."""


@dataclass(frozen=True, slots=True)
class SeenRows:
    """R rows of U units, each of them at P places.

    values:    [R, U, P] floating point
    keys:      [R] int64, the sample of each row with its split
    positions: [R] int64, the position of each row; None: the position of a value is its place, 0 to P - 1
    """

    values: Tensor
    keys: Tensor
    positions: Tensor | None = None

    def at(self, rows: Tensor) -> SeenRows:
        """Some of the rows. rows: [k] int64, their indices."""
        positions = None if self.positions is None else self.positions[rows]
        return SeenRows(self.values[rows], self.keys[rows], positions)


def keys_of(samples: Tensor, split: str | None) -> Tensor:
    """[R] int64: one number for each sample of each split, in the order of the samples."""
    return samples * len(SPLITS) + SPLITS.index(split or "")


class Part(ABC):
    """One kind of numbers of U units. Its attributes are plain values and tensors, which are replaced, not changed."""

    @abstractmethod
    def add(self, seen: SeenRows) -> None:
        """Add all values of the rows."""

    @abstractmethod
    def include(self, other: Any) -> None:
        """Add what another one of the same kind has accumulated."""

    @abstractmethod
    def result(self, at: Sequence[float]) -> dict[str, Tensor]:
        """What it has found, by name. at: the quantiles"""


class Moments(Part):
    """The sum of each unit and, for the covariance, the products of the deviations of each two units, in float64.

    Parts are joined by the formula of Chan, Golub and LeVeque (1979) from deviations around each part's own mean, so
    that nothing cancels where a mean is much larger than the deviations.
    """

    def __init__(self, units: int, has_products: bool, device: torch.device) -> None:
        self.count = 0
        self.sum = torch.zeros(units, dtype=torch.float64, device=device)
        self.products: Tensor | None = None
        if has_products:
            self.products = torch.zeros(units, units, dtype=torch.float64, device=device)

    def add(self, seen: SeenRows) -> None:
        values = seen.values
        if self.products is None:
            self._join(len(values) * values.shape[2], values.sum((0, 2), dtype=torch.float64), None)
            return
        rows = values.movedim(1, 2).flatten(0, 1)
        for part in rows.split(max(_BLOCK // rows.shape[1], 1)):
            part = part.double()
            total = part.sum(0)
            deviations = part - total / len(part)
            self._join(len(part), total, deviations.T @ deviations)

    def include(self, other: Moments) -> None:
        self._join(other.count, other.sum, other.products)

    def _join(self, count: int, total: Tensor, products: Tensor | None) -> None:
        if self.products is not None and products is not None:
            joined = self.products + products
            if self.count and count:
                apart = total / count - self.sum / self.count
                joined += apart.outer(apart) * (self.count * count / (self.count + count))
            self.products = joined
        self.count += count
        self.sum = self.sum + total

    def result(self, at: Sequence[float]) -> dict[str, Tensor]:
        """`count`, `mean` and `cov`, which is unbiased."""
        found = {COUNT: torch.tensor(self.count), MEAN: self.sum / self.count}
        if self.products is not None:
            found[COV] = self.products / (self.count - 1)
        return found


class Largest(Part):
    """The `most` largest values of each unit, at most one of a sample; of equal ones that of the smaller sample.

    values, keys, positions: [U, most], in this order

    As in torch.topk, NaN counts as larger than any number.
    """

    def __init__(self, units: int, most: int, like: Tensor) -> None:
        self.values = like.new_full((units, most), -math.inf)
        self.keys = torch.full((units, most), _NONE, device=like.device)
        self.positions = torch.full_like(self.keys, -1)

    def add(self, seen: SeenRows) -> None:
        """Add the rows. On the CPU only the units and rows that change anything are sorted."""
        best = seen.values.amax(2) if seen.values.shape[2] > 1 else seen.values[:, :, 0]
        if best.is_cpu:
            last = self.values[:, -1]
            is_tied = (best == last) & (seen.keys[:, None] < self.keys[:, -1])
            is_larger = (best > last) | is_tied | best.isnan()
            rows = is_larger.any(1).nonzero().squeeze(1)
            units = is_larger.any(0).nonzero().squeeze(1)
        else:  # which ones change anything cannot be read without waiting
            rows = torch.arange(best.shape[0], device=best.device)
            units = torch.arange(best.shape[1], device=best.device)
        if not len(rows):
            return
        some = seen.at(rows)
        best = best[rows][:, units]
        if some.positions is None:
            positions = some.values[:, units].argmax(2)
        else:
            positions = some.positions[:, None].expand_as(best)
        self._join(units, best.T, some.keys.expand(len(units), -1), positions.T)

    def include(self, other: Largest) -> None:
        units = torch.arange(len(self.values), device=self.values.device)
        self._join(units, other.values, other.keys, other.positions)

    def _join(self, units: Tensor, values: Tensor, keys: Tensor, positions: Tensor) -> None:
        """Add candidates [k, m] to these units [k]."""
        found = [
            torch.cat([self.values[units], values], 1),
            torch.cat([self.keys[units], keys], 1),
            torch.cat([self.positions[units], positions], 1),
        ]
        most = self.values.shape[1]
        found = _sorted(found, by=2)
        found = _sorted(found, by=0, descending=True)
        found = _sorted(found, by=1)
        is_again = found[1].diff(dim=1, prepend=found[1][:, :1] - 1) == 0  # the sample has a larger value
        found[0] = found[0].masked_fill(is_again, -math.inf)
        found[1] = found[1].masked_fill(is_again, _NONE)
        found = _sorted(found, by=1)
        values, keys, positions = _sorted(found, by=0, descending=True)
        self.values = self.values.index_copy(0, units, values[:, :most])
        self.keys = self.keys.index_copy(0, units, keys[:, :most])
        self.positions = self.positions.index_copy(0, units, positions[:, :most])

    def result(self, at: Sequence[float]) -> dict[str, Tensor]:
        """Values, samples, positions and splits; NaN, -1, -1 and 0 where there are fewer samples."""
        is_empty = self.keys == _NONE
        found = (
            self.values.masked_fill(is_empty, math.nan),
            (self.keys // len(SPLITS)).masked_fill(is_empty, -1),
            self.positions.masked_fill(is_empty, -1),
            (self.keys % len(SPLITS)).masked_fill(is_empty, 0),
        )
        return dict(zip(TOP, found, strict=True))


def _sorted(columns: Sequence[Tensor], by: int, *, descending: bool = False) -> list[Tensor]:
    """The tensors [k, m], each row in the order of that of one of them; equal ones stay in their order."""
    order = columns[by].sort(dim=1, descending=descending, stable=True).indices
    return [column.gather(1, order) for column in columns]


class Sketch(Part):
    """Quantiles of each unit from few values, after Munro and Paterson (1980): always the same for the same values.

    A value of level i stands for 2^i. When a level has 2048 values, they are sorted and every second one goes to the
    next level: the first, third, … and the next time the second, fourth, …. Sorting 2k values of weight w so moves a
    rank by at most w, every other time up and otherwise down. n values collapse n / (2k w) times at a level, which has
    log2(n / k) of them: a quantile lies within log2(n / 1024) / 4096 of its rank, in the worst order of values:
    0.25 % after a million values of a unit, 0.5 % after a thousand million. Up to 2047 values it is exact.
    """

    def __init__(self) -> None:
        self.levels: list[Tensor] = []
        self.collapses: list[int] = []

    def add(self, seen: SeenRows) -> None:
        values = seen.values.movedim(1, 0).flatten(1)
        self._put(0, values if values.dtype is torch.float64 else values.float())

    def include(self, other: Sketch) -> None:
        for level, values in enumerate(other.levels):
            self._put(level, values)

    def _put(self, level: int, values: Tensor) -> None:
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
        self.collapses[level] += count
        self._put(level + 1, kept.flatten(1))

    def result(self, at: Sequence[float]) -> dict[str, Tensor]:
        """`quantiles` [U, q], interpolated as by torch.quantile; NaN where a unit has one."""
        values = torch.cat(self.levels, 1)
        weights = [torch.full((kept.shape[1],), 2**level) for level, kept in enumerate(self.levels)]
        ordered, order = values.sort(1)
        ends = torch.cat(weights).to(order.device)[order].cumsum(1)
        places = torch.tensor(at, dtype=torch.float64, device=ends.device) * (ends[:, -1:] - 1)
        below = ordered.gather(1, torch.searchsorted(ends, places.floor().long(), right=True))
        above = ordered.gather(1, torch.searchsorted(ends, places.ceil().long(), right=True))
        found = below.lerp(above, (places - places.floor()).to(below.dtype))
        return {QUANTILES: found.masked_fill(ordered[:, -1:].isnan(), math.nan)}


_PARTS: Mapping[str, type[Part]] = {"moments": Moments, "top": Largest, "quantiles": Sketch}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is accumulated: the covariance, so many of the largest values, these quantiles; the mean always is."""

    cov: bool = False
    top: int = 0
    at: tuple[float, ...] = ()

    def parts(self, units: int, like: Tensor) -> dict[str, Part]:
        """What accumulates it for values of the dtype and on the device of a tensor."""
        parts: dict[str, Part] = {"moments": Moments(units, self.cov, like.device)}
        if self.top:
            parts["top"] = Largest(units, self.top, like)
        if self.at:
            parts["quantiles"] = Sketch()
        return parts

    def size(self, units: int) -> int:
        """The bytes that it takes; of quantiles those of ten levels."""
        of_unit = 8 + 24 * self.top + (4 * HALF * 12 if self.at else 0)
        return units * (of_unit + (8 * units if self.cov else 0))


class Folding:
    """What one fold has accumulated at one module, for each label by itself; without labels under ``""``.

    units:  the sizes of the dimensions of units: [C], or those of an element
    places: the sizes of the others beside that of rows; None: they have differed
    rows:   how many it has seen whose samples nobody has numbered
    """

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.units: list[int] | None = None
        self.places: list[int] | None = None
        self.rows = 0
        self.parts: dict[str, dict[str, Part]] = {}
        self._is_loaded = False  # its tensors may lie on another device than the values
        self._lock = Lock()

    def add(
        self, seen: SeenRows, units: Sequence[int], places: Sequence[int], labels: Tensor | None = None
    ) -> None:
        """Add rows, whose values have these units and places. labels: [R] int64 on the CPU

        ValueError if the units are others than before, or if there are too many labels.
        """
        with self._lock, torch.no_grad():
            if self.units is None:
                self.places = list(places)
            self.units = self.units or list(units)
            if self._is_loaded:
                state = _on(seen.values.device, self.state_dict())
                self.load_state_dict(state)
                self._is_loaded = False
            if self.units != list(units):
                raise ValueError(f"the value has units {list(units)}, and had {self.units} before")
            if self.places != list(places):
                self.places = None
            if labels is None:
                self._add("", seen)
                return
            for label in labels.unique().tolist():
                rows = (labels == label).nonzero().squeeze(1)
                self._add(str(label), seen.at(on_device(rows, seen.values.device)))

    def _add(self, label: str, seen: SeenRows) -> None:
        if label not in self.parts:
            units = seen.values.shape[1]
            count = len(self.parts) + 1
            if count > MOST_LABELS or count * self.wanted.size(units) > MOST_BYTES:
                raise ValueError(
                    f"by: label: there are more than {count - 1} labels, too many to fold {units} units for each"
                )
            self.parts[label] = self.wanted.parts(units, seen.values)
        for part in self.parts[label].values():
            part.add(seen)

    def include(self, other: Folding) -> None:
        """Add what another one has accumulated, of other rows of the same module."""
        if other.units is not None and self.units is None:
            self.units = other.units
            self.places = other.places
        if other.units is not None and self.places != other.places:
            self.places = None
        for label, parts in other.parts.items():
            if label not in self.parts:
                self.parts[label] = parts
                continue
            for name, part in parts.items():
                self.parts[label][name].include(part)

    def state_dict(self) -> dict[str, Any]:
        """All of it as plain values and tensors, which later rows do not change."""
        parts = dict[str, Any]()
        for label, of_label in self.parts.items():
            parts[label] = {name: _on(None, vars(part)) for name, part in of_label.items()}
        return {"units": self.units, "places": self.places, "rows": self.rows, "parts": parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.units = state["units"]
        self.places = state["places"]
        self.rows = state["rows"]
        for label, of_label in state["parts"].items():
            self.parts[label] = {}
            for name, values in of_label.items():
                self.parts[label][name] = part = object.__new__(_PARTS[name])
                vars(part).update(_on(None, values))
        self._is_loaded = True

    def result(self) -> Folded | None:
        """What it has found, on the CPU; None before the first row."""
        if self.units is None:
            return None
        labels = None if "" in self.parts else sorted(map(int, self.parts))
        groups = [""] if labels is None else map(str, labels)
        found = dict[str, list[Tensor]]()
        for group in groups:
            for part in self.parts[group].values():
                for name, tensor in part.result(self.wanted.at).items():
                    found.setdefault(name, []).append(tensor.cpu())
        tensors = dict[str, Tensor]()
        for name, of_groups in found.items():
            stacked = torch.stack(of_groups)
            if name != COUNT and name != COV:
                stacked = stacked.unflatten(1, self.units)
            tensors[name] = stacked[0] if labels is None else stacked
        return Folded(tensors, labels, self.wanted.at, self.places)


def _on(device: torch.device | None, value: Any) -> Any:
    """Plain values and tensors in new lists and mappings; with a device there."""
    if isinstance(value, Tensor):
        return value if device is None else value.to(device)
    if isinstance(value, dict):
        return {key: _on(device, each) for key, each in value.items()}
    return [_on(device, each) for each in value] if isinstance(value, list) else value


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


class Folded(Shown):
    """The result of a fold at one module. With `by: label` each tensor has the labels as its first dimension.

    mean:      [channels], or in the shape of an element, float64
    cov:       [channels, channels] float64, unbiased; None: it was not asked for, as for the others
    quantiles: [channels, q], for the numbers in `at`
    top:       the largest values, their samples and positions
    count:     how many values of each unit there were
    labels:    None: without `by: label`
    places:    the sizes of the dimensions that `top.positions` numbers; None: they differed
    tensors:   all of them by their names in the file
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        labels: Sequence[int] | None = None,
        at: Iterable[float] = (),
        places: Sequence[int] | None = None,
    ) -> None:
        self.tensors = dict(tensors)
        self.labels = None if labels is None else list(labels)
        self.at = list(at)
        self.places = None if places is None else list(places)
        self.mean = self.tensors[MEAN]
        self.cov = self.tensors.get(COV)
        self.quantiles = self.tensors.get(QUANTILES)
        self.count = self.tensors[COUNT]
        self.top: Top | None = None
        if TOP[0] in self.tensors:
            self.top = Top(*(self.tensors[name] for name in TOP))

    def _view(self) -> View:
        rows = [[name, str(list(tensor.shape)), str(tensor.dtype)] for name, tensor in self.tensors.items()]
        labels = "" if self.labels is None else f", {len(self.labels)} labels"
        return View(f"fold of {int(self.count.sum()):,} values a unit{labels}", ("", "shape", "dtype"), rows)
