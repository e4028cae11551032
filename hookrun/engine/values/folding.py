"""What a fold accumulates of the rows that a hook sees: moments, largest values and quantiles of units.

A unit is a channel or an element of a row. The numbers of R rows of U units, each at P places, come as [R, U, P]. What
has been accumulated, of a few rows or of all, is one mapping, and `_merged` puts two of them together:

    count:     how many values of each unit
    sum:       [U] float64
    products:  [U, U] float64, of the deviations of each two units; with `cov` only
    top:       values, keys and positions of the largest, each [U, n]; with `top` only
    levels, collapses: those of a Sketch; with `quantiles` only

Its tensors are on the device of the values, and are replaced and never changed: a saved state can hold them as they
are. On an accelerator nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from hookrun.engine.values.containers import rebuild
from hookrun.engine.values.folded import COUNT, COV, MEAN, QUANTILES, SPLITS, TOP, Folded
from hookrun.engine.values.sketch import HALF, Sketch
from hookrun.engine.values.tensors import on_device

MOST_BYTES = 2**29
"""What a fold may hold at one module, all its labels together."""

MOST_LABELS = 1000

_NO_KEY = 2**62
"""Greater than the key of any sample."""

_BLOCK = 2**22
"""Elements whose deviations from their mean are computed at a time."""

_CACHED = 2**17
"""Elements that the CPU adds up at a time: their copies in float64 stay in the cache."""

Sums = Mapping[str, Any]

_EMPTY = (-math.inf, _NO_KEY, -1)
"""Value, key and position of a place that is still empty."""


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

    def at(self, rows: Tensor | slice) -> SeenRows:
        """Some of the rows. rows: their indices, [k] int64 on the CPU"""
        positions = None if self.positions is None else self.positions[rows]
        of_values = rows if isinstance(rows, slice) else on_device(rows, self.values.device)
        return SeenRows(self.values[of_values], self.keys[rows], positions)


def keys_of(samples: Tensor, split: str | None) -> Tensor:
    """[R] int64: one number for each sample of each split, in the order of the samples."""
    return samples * len(SPLITS) + SPLITS.index(split or "")


def _moments(values: Tensor, *, has_products: bool) -> Sums:
    """Count, sum and products of rows."""
    block = _CACHED if values.is_cpu and not has_products else _BLOCK
    found = dict[str, Any]()
    for part in values.split(max(block // values[0].numel(), 1)):
        part = part.double()
        count = part[:, 0].numel()
        moments: dict[str, Any] = {"count": count, "sum": part.sum((0, 2))}
        if has_products:
            apart = part.movedim(1, 0).flatten(1)
            apart = apart - moments["sum"][:, None] / count
            moments["products"] = apart @ apart.T
        found = _merged_moments(found, moments) if found else moments
    return found


def _merged_moments(one: Sums, other: Sums) -> dict[str, Any]:
    """Those of both parts, by the formula of Chan, Golub and LeVeque (1979): a large mean does not cancel anything."""
    count = one["count"] + other["count"]
    merged = {"count": count, "sum": one["sum"] + other["sum"]}
    if "products" in one:
        apart = other["sum"] / other["count"] - one["sum"] / max(one["count"], 1)
        weight = one["count"] * other["count"] / count
        merged["products"] = one["products"] + other["products"] + weight * apart.outer(apart)
    return merged


def _by_sample(seen: SeenRows) -> tuple[Tensor, Tensor, Tensor]:
    """[S, U, P], a row for each sample, with the places of all its rows; [S], the keys; [S, P], the positions."""
    values = seen.values
    places = (
        torch.arange(values.shape[2], device="cpu") if seen.positions is None else seen.positions[:, None]
    )
    positions = places.expand(len(values), values.shape[2])
    if bool((seen.keys[1:] > seen.keys[:-1]).all()):  # faster than to sort them
        return values, seen.keys, positions
    keys, sample_of = seen.keys.unique(return_inverse=True)
    if len(keys) == len(seen.keys):
        return values, seen.keys, positions
    counts = sample_of.bincount()
    order = sample_of.argsort(stable=True)
    firsts = counts.cumsum(0) - counts
    number = torch.arange(len(order), device="cpu") - firsts[sample_of[order]]
    size = (len(keys), int(counts.max()))
    place = sample_of[order] * size[1] + number
    spread = values.new_full((size[0] * size[1], *values.shape[1:]), -math.inf)
    spread = spread.index_copy(0, on_device(place, values.device), values[on_device(order, values.device)])
    positions = positions.new_full((size[0] * size[1], values.shape[2]), -1).index_copy(
        0, place, positions[order]
    )
    return spread.unflatten(0, size).movedim(1, 2).flatten(2), keys, positions.view(len(keys), -1)


def _entering(top: Sequence[Tensor], best: Tensor, keys: Tensor, *, are_most: bool) -> tuple[Tensor, Tensor]:
    """Row and unit, in the order of units, of the values [S, U] on the CPU that may be among the largest.

    are_most: there are more of them than before, so that they rule out each other
    """
    least = top[0][:, -1].nan_to_num(math.inf, math.inf, -math.inf)
    least_key = top[1][:, -1]
    most = top[0].shape[1]
    if are_most and len(best) > most:
        of_these = best.topk(most, 0).values[-1].nan_to_num(math.inf, math.inf, -math.inf)
        least_key = least_key.where(of_these <= least, _NO_KEY)
        least = least.maximum(of_these)
    may_be_tied = bool((keys.min() < least_key).any())
    stays = torch.lt if may_be_tied else torch.le  # neither holds for NaN
    apart = best - least  # faster to reduce than booleans
    rows = stays(apart.amax(1), 0).logical_not_().nonzero().squeeze(1)
    apart = apart[rows]
    enters = stays(apart, 0).logical_not_()
    if may_be_tied:
        enters &= (apart != 0) | (keys[rows, None] < least_key)
    places, units = enters.nonzero(as_tuple=True)
    units, order = units.sort(stable=True)
    return rows[places[order]], units


def _candidates(before: Sums, seen: SeenRows) -> list[Tensor]:
    """Values, keys and positions [U, k] of what may be among the largest: on the CPU of as few rows as possible."""
    values, keys, positions = _by_sample(seen)
    best = values.amax(2) if values.shape[2] > 1 else values[:, :, 0]
    if not best.is_cpu:
        keys = on_device(keys, best.device)[:, None].expand_as(best)
        found = on_device(positions, best.device).gather(1, values.argmax(2))
        return [best.T, keys.T, found.T]
    rows, units = _entering(before["top"], best, keys, are_most=values[:, 0].numel() > before["count"])
    found = positions[rows, values[rows, units].argmax(1)]
    counts = units.bincount(minlength=best.shape[1])
    firsts = counts.cumsum(0) - counts
    number = torch.arange(len(units), device="cpu") - firsts[units]
    columns = list[Tensor]()
    for column, fill in zip((best[rows, units], keys[rows], found), _EMPTY, strict=True):
        table = column.new_full((len(counts), int(counts.max())), fill)
        table[units, number] = column
        columns.append(table)
    return columns


def _merged_top(one: Sequence[Tensor], other: Sequence[Tensor]) -> list[Tensor]:
    """The largest values of both; there are as many as in the first."""
    most = one[0].shape[1]
    columns = [torch.cat(pair, 1) for pair in zip(one, other, strict=True)]
    if not columns[0].is_cpu:
        return _largest(columns, most)
    units = (other[1] != _NO_KEY).any(1).nonzero().squeeze(1)  # the others stay
    changed = _largest([column[units] for column in columns], most)
    pairs = zip(columns, changed, strict=True)
    return [column[:, :most].index_copy(0, units, of_units) for column, of_units in pairs]


def _largest(columns: Sequence[Tensor], most: int) -> list[Tensor]:
    """The `most` largest values of each unit, at most one of a sample; of equal ones those of the smaller samples.

    columns: values, keys and positions, each [U, n]; of equal ones of a sample the first stays

    As in torch.topk, NaN counts as larger than any number.
    """
    columns = _sorted(_sorted(columns, 0, descending=True), 1)
    keys = columns[1]
    is_again = torch.zeros_like(keys, dtype=torch.bool)
    is_again[:, 1:] = keys[:, 1:] == keys[:, :-1]  # the sample has a larger value
    pairs = zip(columns, _EMPTY, strict=True)
    distinct = [column.masked_fill(is_again, fill) for column, fill in pairs]
    in_order = _sorted(
        _sorted(distinct, 1), 0, descending=True
    )  # an empty place is behind a sample with -inf
    return [column[:, :most].clone() for column in in_order]  # not views, which would hold the rest


def _sorted(columns: Sequence[Tensor], by: int, *, descending: bool = False) -> list[Tensor]:
    """The tensors [U, n], each row in the order of that of one of them; equal ones stay in their order."""
    order = columns[by].sort(dim=1, descending=descending, stable=True).indices
    return [column.gather(1, order) for column in columns]


def _merged(one: Sums, other: Sums) -> Sums:
    """What both have accumulated together."""
    merged = _merged_moments(one, other)
    if "top" in one:
        merged["top"] = _merged_top(one["top"], other["top"])
    if "levels" in one:
        sketch = Sketch(list(one["levels"]), list(one["collapses"]))
        for level, values in enumerate(other["levels"]):
            sketch.add(level, values)
        merged |= {"levels": sketch.levels, "collapses": sketch.collapses}
    return merged


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is accumulated beside the mean: the covariance, so many of the largest values, quantiles."""

    cov: bool = False
    top: int = 0
    at: tuple[float, ...] = ()

    def size(self, units: int) -> int:
        """The bytes that it takes for so many units; of quantiles those of ten levels."""
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
        empty = (units, wanted.top)
        keys = values.new_full(empty, _NO_KEY, dtype=torch.int64)
        sums["top"] = [values.new_full(empty, -math.inf), keys, torch.full_like(keys, -1)]
    if wanted.at:
        sums |= {"levels": [], "collapses": []}
    return sums


def _of_rows(seen: SeenRows, before: Sums) -> Sums:
    """What rows add to what there is before them."""
    values = seen.values
    sums = dict(_moments(values, has_products="products" in before))
    if "top" in before:
        sums["top"] = _candidates(before, seen)
    if "levels" in before:
        flat = values.movedim(1, 0).flatten(1)
        sums["levels"] = [flat if flat.dtype is torch.float64 else flat.float()]
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
        self.sums[label] = _merged(before, _of_rows(seen, before))

    def _before(self, label: str, values: Tensor) -> Sums:
        """What the label has accumulated, on the device of the values."""
        if label in self.sums:
            # those of a resumed run come from the CPU
            return rebuild(self.sums[label], lambda x: x.to(values.device) if isinstance(x, Tensor) else x)
        units = values.shape[1]
        too_many = labels_refused(len(self.sums) + 1, units, self.wanted.size(units))
        if label and too_many:
            raise ValueError(f"by: label: {too_many}")
        return _nothing(self.wanted, values)

    def state_dict(self) -> dict[str, Any]:
        """All of it as plain values and tensors."""
        return {"units": self.units, "places": self.places, "rows": self.rows, "sums": dict(self.sums)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add what a state has accumulated, of other rows of the same module."""
        if state["units"] is None:
            return
        self._note(state["units"], state["places"])
        self.rows += state["rows"]
        for label, sums in state["sums"].items():
            before = self.sums.get(label)
            self.sums[label] = sums if before is None else _merged(before, sums)

    def result(self) -> Folded | None:
        """What it has found, on the CPU; None before the first row."""
        if self.units is None:
            return None
        labels = None if "" in self.sums else sorted(map(int, self.sums))
        groups = [self._of_label(str(label)) for label in labels or ()] or [self._of_label("")]
        tensors = dict[str, Tensor]()
        for name in groups[0]:
            found = torch.stack([group[name].cpu() for group in groups])
            tensors[name] = found[0] if labels is None else found
        return Folded(tensors, labels, self.wanted.at, self.places)

    def _of_label(self, label: str) -> dict[str, Tensor]:
        """The result of a label: name -> tensor."""
        assert self.units is not None
        sums = self.sums[label]
        count = sums["count"]
        found = {MEAN: sums["sum"] / count}
        if "top" in sums:
            values, keys, positions = sums["top"]
            columns = (values, keys // len(SPLITS), positions, keys % len(SPLITS))
            for name, column, fill in zip(TOP, columns, (math.nan, -1, -1, 0), strict=True):
                found[name] = column.masked_fill(keys == _NO_KEY, fill)
        if "levels" in sums:
            found[QUANTILES] = Sketch(sums["levels"], sums["collapses"]).quantiles(self.wanted.at)
        found = {name: tensor.unflatten(0, self.units) for name, tensor in found.items()}
        if "products" in sums:
            found[COV] = sums["products"] / (count - 1)
        return {**found, COUNT: torch.tensor(count)}
