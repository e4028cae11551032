"""The largest values of units over many rows, with their samples and positions.

What was found is three tensors, values, keys and positions, each [U, n] with the largest first. On the CPU only what is
beyond the least of them is taken out of a batch, and waits until there is enough of it to be sorted. On an accelerator
every batch is sorted, since nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookrun.engine.values.tensors import in_numpy, on_device

_NO_KEY = 2**62
"""Greater than the key of any sample."""

_EMPTY = (-math.inf, _NO_KEY, -1)
"""Value, key and position of a place that is still empty."""

_BLOCK = 8
"""Rows that are passed over together if their largest value is too small: at most so many."""

Columns = Sequence[Tensor]
"""Values, keys and positions; of what waits also, in front of them, units: each [n]."""

Array = NDArray[Any]


@dataclass(slots=True)
class Waiting:
    """What may be among the largest and is not sorted in yet.

    least:      [U], values that are below these are not among the largest
    least_keys: [U], nor are equal ones whose keys are not below these
    columns:    with room for as many as there are places for the largest; new memory for each batch would lie between
                the outputs of modules, and keep the memory of those from being used again
    count:      how many wait
    """

    least: Array
    least_keys: Array
    columns: Columns
    count: int = 0

    @classmethod
    def behind(cls, top: Columns) -> Waiting:
        """Nothing yet, behind these largest ones."""
        values, keys, positions = [torch.empty_like(column).flatten() for column in top]
        return cls(*_least_of(top), [torch.empty_like(keys), values, keys, positions])

    def with_more(self, top: Columns, entering: Columns) -> Columns:
        """The largest, after these wait too; if there is no room for them, all have been sorted in."""
        count = self.count + len(entering[0])
        if count > len(self.columns[0]) or entering[1].dtype != self.columns[1].dtype:
            top = settled(top, [self.filled(), entering])
            self.least, self.least_keys = _least_of(top)
            self.count = 0
            return top
        for column, new in zip(self.columns, entering, strict=True):
            column[self.count : count] = new
        self.count = count
        return top

    def filled(self) -> Columns:
        """What waits."""
        return [column[: self.count] for column in self.columns]


def _least_of(top: Columns) -> tuple[Array, Array]:
    """What has to be reached after these: values and keys."""
    values, keys, _ = top
    return _without_nan(in_numpy(values[:, -1])), keys[:, -1].numpy()


def none_of(values: Tensor, most: int) -> list[Tensor]:
    """Before the first row: `most` empty places for each unit. values: [R, U, P], such as it will have"""
    size = (values.shape[1], most)
    least = values.new_full(size, -math.inf)
    keys = values.new_full(size, _NO_KEY, dtype=torch.int64)
    positions = torch.full_like(keys, -1)
    return [least, keys, positions]


def is_empty(keys: Tensor) -> Tensor:
    """Which places are still empty."""
    return keys == _NO_KEY


def with_rows(
    top: Columns, waiting: Waiting | None, values: Tensor, keys: Tensor, positions: Tensor | None
) -> tuple[Columns, Waiting | None]:
    """The largest and what waits, together with rows; see `SeenRows`."""
    if positions is not None:
        positions = positions.unsqueeze(1).expand(len(values), values.shape[2])
    values, keys, positions = _by_sample(values, keys, positions)
    best = values.amax(2) if values.shape[2] > 1 else values.squeeze(2)
    if not best.is_cpu:
        places = values.argmax(2)
        positions = on_device(_positions(positions, values), best.device).gather(1, places)
        keys = on_device(keys, best.device)
        of_units = best.T
        return merged(top, [of_units, keys.expand(of_units.shape), positions.T]), waiting
    waiting = waiting or Waiting.behind(top)
    rows, units = _entering(waiting, top[0].shape[1], in_numpy(best), keys.numpy())
    if not len(rows):
        return top, waiting
    largest, places = values[rows, units].max(1)
    positions = places if positions is None else positions[rows, places]
    return waiting.with_more(top, [units, largest, keys[rows], positions]), waiting


def _by_sample(
    values: Tensor, keys: Tensor, positions: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """[S, U, P], a row for each sample, with the places of all its rows; [S], the keys; [S, P], the positions.

    positions: [R, P]; None: the places
    """
    in_order = keys.numpy()
    if (in_order[1:] > in_order[:-1]).all():  # faster than to sort them
        return values, keys, positions
    samples, sample_of = keys.unique(return_inverse=True)
    if len(samples) == len(keys):
        return values, keys, positions
    sample_of, order = sample_of.sort(stable=True)
    grouped = _by_group(_positions(positions, values)[order], sample_of, -1)
    order = on_device(order, values.device)
    values = _by_group(values[order], sample_of, -math.inf)
    return values.movedim(1, 2).flatten(2), samples, grouped.flatten(1)


def _positions(positions: Tensor | None, values: Tensor) -> Tensor:
    """[R, P]: the positions; without them the places."""
    rows, _, places = values.shape
    if positions is None:
        return torch.arange(places, device="cpu").expand(rows, places)
    return positions


def _by_group(x: Tensor, groups: Tensor, fill: float) -> Tensor:
    """[G, most, ...]: the elements [N, ...] of each group in their order, and behind them `fill`.

    groups: [N] int64 on the CPU, from 0 and ascending
    """
    counts = groups.bincount()
    firsts = counts.cumsum(0) - counts
    places = torch.arange(len(groups), device="cpu")
    places = on_device(places - firsts[groups], x.device)
    most = int(counts.max())
    found = x.new_full((len(counts), most, *x.shape[1:]), fill)
    groups = on_device(groups, x.device)
    found[groups, places] = x
    return found


def _entering(waiting: Waiting, most: int, best: Array, keys: Array) -> Columns:
    """Row and unit of the values [S, U] that may be among the largest; those of a unit in the order of rows."""
    least, least_keys = waiting.least, waiting.least_keys
    size = _block_size(len(best), most)
    in_blocks = best.reshape(-1, size, best.shape[1])
    blocks = np.maximum.reduce(in_blocks, 1)
    may_be_tied = keys.min() < least_keys.max()
    stays_below = np.less if may_be_tied else np.less_equal  # neither holds for NaN
    block, units = _where_not(stays_below(blocks, least))
    are_many = len(units) > most * len(least)
    if are_many and len(blocks) >= most:  # they rule out each other
        of_blocks = _without_nan(np.partition(blocks, -most, axis=0)[-most])
        least_keys = np.where(of_blocks <= least, least_keys, _NO_KEY)
        least = np.maximum(of_blocks, least)
        may_be_tied = True
        stays_below = np.less
        block, units = _where_not(blocks < least)
    place, number = _where_not(stays_below(in_blocks[block, :, units], least[units, None]))
    rows = block[place] * size + number
    units = units[place]
    if may_be_tied:
        is_tied = best[rows, units] == least[units]
        is_later = keys[rows] >= least_keys[units]
        enters = ~(is_tied & is_later)
        rows = rows[enters]
        units = units[enters]
    return torch.from_numpy(rows), torch.from_numpy(units)


def _block_size(rows: int, most: int) -> int:
    """How many rows make a block: they divide the rows, and where they can leave `most` blocks."""
    for size in range(min(_BLOCK, rows // most), 1, -1):
        if rows % size == 0:
            return size
    return 1


def _where_not(is_below: Array) -> tuple[Array, ...]:
    """Rows and columns of what is not below."""
    return np.divmod(np.flatnonzero(~is_below), is_below.shape[1])


def _without_nan(values: Array) -> Array:
    """The same as bounds: nothing is above NaN."""
    return np.where(np.isnan(values), math.inf, values)


def settled(top: Columns, waiting: Sequence[Columns]) -> list[Tensor]:
    """The largest, of what waits too."""
    units, *columns = [torch.cat(parts) for parts in zip(*waiting, strict=True)]
    units, order = units.sort(stable=True)
    changed, unit_of = units.unique_consecutive(return_inverse=True)
    before = [column[changed] for column in top]
    entering: list[Tensor] = []
    for column, fill in zip(columns, _EMPTY, strict=True):
        entering.append(_by_group(column[order], unit_of, fill))
    found: list[Tensor] = []
    for column, new in zip(top, merged(before, entering), strict=True):
        found.append(column.to(new.dtype).index_copy(0, changed, new))
    return found


def merged(one: Columns, other: Columns) -> list[Tensor]:
    """The largest of both, as many as in the first: at most one of a sample, of equal ones those of smaller samples.

    Of equal ones of a sample the first stays. As in torch.topk, NaN counts as larger than any number.
    """
    most = one[0].shape[1]
    columns = [torch.cat(pair, 1) for pair in zip(one, other, strict=True)]
    if columns[0].is_cpu:
        columns = _sorted(columns, 1)
        if bool(_repeats(columns[1]).any()):
            columns = _distinct(columns)
    else:
        columns = _distinct(columns)
    return _sorted(columns, 0, most, descending=True)


def _distinct(columns: Columns) -> list[Tensor]:
    """In the order of keys, with empty places, which are last, instead of what its sample has a larger value than."""
    columns = _sorted(columns, 0, descending=True)
    columns = _sorted(columns, 1)
    is_again = _repeats(columns[1])
    distinct: list[Tensor] = []
    for column, fill in zip(columns, _EMPTY, strict=True):
        distinct.append(column.masked_fill(is_again, fill))
    return _sorted(distinct, 1)


def _repeats(keys: Tensor) -> Tensor:
    """Which keys stand next to the same. keys: [U, n], in ascending order"""
    is_again = torch.zeros_like(keys, dtype=torch.bool)
    is_again[:, 1:] = keys.diff() == 0
    return is_again & (keys != _NO_KEY)


def _sorted(columns: Columns, by: int, most: int | None = None, *, descending: bool = False) -> list[Tensor]:
    """The tensors [U, n], each row in the order of that of one of them; equal ones stay in their order.

    most: so many of each row; None: all
    """
    order = columns[by].sort(dim=1, descending=descending, stable=True).indices
    order = order[:, :most]
    return [column.gather(1, order) for column in columns]
