"""What a fold accumulates of the rows that a hook sees, and its result: moments, largest values and quantiles of units.

A unit is a channel or an element of a row. The numbers of R rows of U units, each at P places, come as [R, U, P]. What
is accumulated is plain values and tensors, on the device of the values, which are replaced and never changed: a saved
state can hold them as they are. Nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from hookrun.engine.html import Shown, View
from hookrun.engine.values.containers import rebuild
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

HALF = 1024
"""Values that a collapse of a sketch keeps: half of what it sorts."""

_NONE = 2**62
"""The key of a place that is still empty: greater than that of any sample."""

_BLOCK = 2**22
"""Elements whose deviations from their mean are computed at a time."""

_CACHED = 2**17
"""Elements that the CPU adds up at a time: their copies in float64 stay in the cache."""


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
        """Some of the rows. rows: [k] int64 on the CPU, their indices."""
        positions = None if self.positions is None else self.positions[rows]
        return SeenRows(self.values[on_device(rows, self.values.device)], self.keys[rows], positions)


def keys_of(samples: Tensor, split: str | None) -> Tensor:
    """[R] int64: one number for each sample of each split, in the order of the samples."""
    return samples * len(SPLITS) + SPLITS.index(split or "")


def split_name(number: int) -> str:
    """The split of this number; ``""`` if it is not known."""
    return SPLITS[number] if 0 <= number < len(SPLITS) else ""


# ---- moments -------------------------------------------------------------------------------------------------------


def _moments(values: Tensor, *, has_products: bool) -> dict[str, Any]:
    """Number and sum of the values of each unit and the products of the deviations of each two units, in float64."""
    size = values[0].numel()
    if not has_products:
        parts = values.split(max(_CACHED // size, 1)) if values.is_cpu else [values]
        sums = [part.double().sum((0, 2)) for part in parts]
        return {"count": values[:, 0].numel(), "sum": torch.stack(sums).sum(0)}
    found = dict[str, Any]()
    for part in values.split(max(_BLOCK // size, 1)):
        rows = part.movedim(1, 2).flatten(0, 1).double()
        total = rows.sum(0)
        apart = rows - total / len(rows)
        found = _joined_moments(found, {"count": len(rows), "sum": total, "products": apart.T @ apart})
    return found


def _joined_moments(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Those of both parts, by the formula of Chan, Golub and LeVeque (1979): a large mean does not cancel anything."""
    if not one:
        return dict(other)
    count = one["count"] + other["count"]
    joined = {"count": count, "sum": one["sum"] + other["sum"]}
    if "products" in one:
        apart = other["sum"] / other["count"] - one["sum"] / one["count"]
        more = apart.outer(apart) * (one["count"] * other["count"] / count)
        joined["products"] = one["products"] + other["products"] + more
    return joined


# ---- the largest values --------------------------------------------------------------------------------------------


def _with_rows(top: Sequence[Tensor] | None, seen: SeenRows, most: int) -> list[Tensor]:
    """The largest values after these rows. On the CPU only units and rows that may change anything are compared."""
    values = seen.values
    best = values.amax(2) if values.shape[2] > 1 else values[:, :, 0]
    units = torch.arange(best.shape[1], device=best.device)
    rows = torch.arange(len(best), device="cpu")
    if top is not None and best.is_cpu:
        last = top[0][:, -1]
        largest = best.amax(0)
        is_tied = (largest == last) & (seen.keys.min() < top[1][:, -1])
        units = units[(largest > last) | is_tied | largest.isnan()]
        if not len(units):
            return list(top)
        best = best.index_select(1, units)
        rows = rows[~((best - last[units]).amax(1) < 0)]  # faster than to reduce booleans
        best = best[rows]
    best, first, keys = _best_of_samples(best, seen.keys[rows])
    order = _largest(best.T, most)
    places = on_device(rows, best.device)[first.T.gather(1, order)]
    if seen.positions is None:
        positions = values[places, units[:, None]].argmax(2)
    else:
        positions = on_device(seen.positions, best.device)[places]
    columns = [best.T.gather(1, order), on_device(keys, best.device)[order], positions]
    if top is None:
        return _first(columns, most)
    part = _first(
        [torch.cat([old[units], column], 1) for old, column in zip(top, columns, strict=True)], most
    )
    return [old.index_copy(0, units, column) for old, column in zip(top, part, strict=True)]


def _largest(values: Tensor, most: int) -> Tensor:
    """[U, k]: where the `most` largest values [U, S] are, of equal ones the first; a sort takes 30 times as long."""
    count = min(most, values.shape[1])
    values = values.nan_to_num(math.inf, math.inf, -math.inf)
    least = values.topk(count).values[:, -1:]
    is_above = values > least
    is_tied = values == least
    is_taken = is_above | (is_tied & (is_tied.cumsum(1) <= count - is_above.sum(1, keepdim=True)))
    from_end = torch.arange(values.shape[1], 0, -1, device=values.device)
    return (is_taken * from_end).topk(count).indices


def _best_of_samples(best: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[S, U], the largest value of each sample; [S, U], the first row that has it; [S], the ascending keys.

    best: [R, U]; keys: [R] on the CPU
    """
    keys, sample_of = keys.unique(return_inverse=True)
    if len(keys) == len(best):
        order = on_device(sample_of.argsort(), best.device)
        return best[order], order[:, None].expand_as(best), keys
    index = on_device(sample_of, best.device)[:, None].expand_as(best)
    largest = best.new_full((len(keys), best.shape[1]), -math.inf).scatter_reduce(0, index, best, "amax")
    has_it = (best == largest.gather(0, index)) | best.isnan()
    numbers = torch.arange(len(best), device=best.device)[:, None].where(has_it, len(best))
    first = numbers.new_full(largest.shape, len(best)).scatter_reduce(0, index, numbers, "amin")
    return largest, first, keys


def _first(columns: Sequence[Tensor], most: int) -> list[Tensor]:
    """The `most` largest values of each unit, at most one of a sample; of equal ones those of the smaller samples.

    columns: values, keys and positions, each [U, n]

    As in torch.topk, NaN counts as larger than any number. Where there are fewer samples, the key is `_NONE`.
    """
    empty = (-math.inf, _NONE, -1)
    columns = [
        torch.cat([x, x.new_full((len(x), most), end)], 1) for x, end in zip(columns, empty, strict=True)
    ]
    values, keys, positions = _sorted(_sorted(_sorted(columns, 2), 0, descending=True), 1)
    is_again = torch.zeros_like(keys, dtype=torch.bool)
    is_again[:, 1:] = keys[:, 1:] == keys[:, :-1]  # the sample has a larger value
    kept = [values.masked_fill(is_again, -math.inf), keys.masked_fill(is_again, _NONE), positions]
    return [column[:, :most] for column in _sorted(_sorted(kept, 1), 0, descending=True)]


def _sorted(columns: Sequence[Tensor], by: int, *, descending: bool = False) -> list[Tensor]:
    """The tensors [U, n], each row in the order of that of one of them; equal ones stay in their order."""
    order = columns[by].sort(dim=1, descending=descending, stable=True).indices
    return [column.gather(1, order) for column in columns]


# ---- quantiles -----------------------------------------------------------------------------------------------------


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


# ---- all of them ---------------------------------------------------------------------------------------------------


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


class Folding:
    """What one fold has accumulated at one module, for each label by itself; without labels under ``""``.

    units:  the sizes of the dimensions of units: [C], or those of an element
    places: the sizes of the others beside that of rows; None: they have differed
    rows:   how many it has seen whose samples nobody has numbered
    sums:   label -> `moments`, `top` (values, keys, positions), and `levels` and `collapses` of a sketch
    """

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.units: list[int] | None = None
        self.places: list[int] | None = None
        self.rows = 0
        self.sums: dict[str, dict[str, Any]] = {}
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
        values = seen.values
        count = len(self.sums)
        is_new = label not in self.sums
        if is_new and (count == MOST_LABELS or (count + 1) * self.wanted.size(values.shape[1]) > MOST_BYTES):
            raise ValueError(
                f"by: label: more than {count} labels are too many for {values.shape[1]:,} units"
            )
        # those of a resumed run come from the CPU
        before = rebuild(
            self.sums.get(label, {}), lambda x: x.to(values.device) if isinstance(x, Tensor) else x
        )
        moments = _moments(values, has_products=self.wanted.cov)
        sums: dict[str, Any] = {"moments": _joined_moments(before.get("moments", {}), moments)}
        if self.wanted.top:
            sums["top"] = _with_rows(before.get("top"), seen, self.wanted.top)
        if self.wanted.at:
            sketch = Sketch(list(before.get("levels", ())), list(before.get("collapses", ())))
            flat = values.movedim(1, 0).flatten(1)
            sketch.add(0, flat if flat.dtype is torch.float64 else flat.float())
            sums |= {"levels": sketch.levels, "collapses": sketch.collapses}
        self.sums[label] = sums

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
            self.sums[label] = sums if before is None else self._joined(before, sums)

    def _joined(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
        joined: dict[str, Any] = {"moments": _joined_moments(one["moments"], other["moments"])}
        if "top" in one:
            pairs = zip(one["top"], other["top"], strict=True)
            joined["top"] = _first([torch.cat(pair, 1) for pair in pairs], one["top"][0].shape[1])
        if "levels" in one:
            sketch = Sketch(list(one["levels"]), list(one["collapses"]))
            for level, values in enumerate(other["levels"]):
                sketch.add(level, values)
            joined |= {"levels": sketch.levels, "collapses": sketch.collapses}
        return joined

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
        count = sums["moments"]["count"]
        found = {MEAN: sums["moments"]["sum"] / count}
        if "top" in sums:
            values, keys, positions = sums["top"]
            is_empty = keys == _NONE
            samples = keys // len(SPLITS)
            splits = keys % len(SPLITS)
            empty = (math.nan, -1, -1, 0)
            columns = (values, samples, positions, splits)
            for name, column, fill in zip(TOP, columns, empty, strict=True):
                found[name] = column.masked_fill(is_empty, fill)
        if "levels" in sums:
            found[QUANTILES] = Sketch(sums["levels"], sums["collapses"]).quantiles(self.wanted.at)
        found = {name: tensor.unflatten(0, self.units) for name, tensor in found.items()}
        if "products" in sums["moments"]:
            found[COV] = sums["moments"]["products"] / (count - 1)
        return {**found, COUNT: torch.tensor(count)}


MOST_SHOWN = 12
"""Units of a module that the page shows with their samples, of which the run keeps pictures."""


def largest_units(fold: Folded) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The indices of the units that are shown, those with the largest values first, and of the others."""
    if fold.top is None:
        return [], []
    largest = fold.top.values[..., 0]
    order = largest.flatten().double().nan_to_num(-math.inf).sort(descending=True, stable=True).indices
    units = [tuple(unit) for unit in torch.stack(torch.unravel_index(order, largest.shape), 1).tolist()]
    return units[:MOST_SHOWN], units[MOST_SHOWN:]


def shown_samples(folds: Mapping[str, Mapping[str, Folded]]) -> set[tuple[str, int]]:
    """(split, sample) of what the page shows of folds."""
    found = set[tuple[str, int]]()
    for modules in folds.values():
        for fold in modules.values():
            for unit in largest_units(fold)[0]:
                samples, splits = (fold.tensors[name][unit].tolist() for name in (TOP[1], TOP[3]))
                found.update(zip(map(split_name, splits), samples, strict=True))
    return found


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
