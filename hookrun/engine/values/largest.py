"""The largest values of units over many rows, with their samples and positions.

What was found is three tensors, values, keys and positions, each [U, n] with the largest first. On the CPU only what is
beyond the least of them is taken out of a batch, and waits until there is enough of it to be sorted. On an accelerator
every batch is sorted, since nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hookrun.engine.values.tensors import on_device

_NO_KEY = 2**62
"""Greater than the key of any sample."""

_EMPTY = (-math.inf, _NO_KEY, -1)
"""Value, key and position of a place that is still empty."""

_BLOCK = 32
"""Rows that are passed over together if their largest value is too small: at most so many, and a multiple of 4."""

_MOST_WAITING = 64
"""Batches of which something waits."""

Columns = Sequence[Tensor]
"""Values, keys and positions; of what waits also, in front of them, units: each [n]."""


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
    top: Columns, waiting: Sequence[Columns], values: Tensor, keys: Tensor, positions: Tensor | None
) -> tuple[Columns, Sequence[Columns]]:
    """The largest and what waits, together with rows; see `SeenRows`."""
    values, keys, positions = _by_sample(values, keys, positions)
    best = values.amax(2) if values.shape[2] > 1 else values.squeeze(2)
    if not best.is_cpu:
        places = values.argmax(2)
        positions = on_device(positions, best.device).gather(1, places)
        keys = on_device(keys, best.device)
        of_units = best.T
        rows_of_units = [of_units, keys.expand(of_units.shape), positions.T]
        return merged(top, rows_of_units), waiting
    rows, units = _entering(top, best, keys)
    if not len(rows):
        return top, waiting
    places = values[rows, units].argmax(1)
    entering = (units, best[rows, units], keys[rows], positions[rows, places])
    waiting = [*waiting, entering]
    count = sum(len(columns[0]) for columns in waiting)
    if len(waiting) < _MOST_WAITING and count < top[0].numel():
        return top, waiting
    return settled(top, waiting), []


def _by_sample(values: Tensor, keys: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """[S, U, P], a row for each sample, with the places of all its rows; [S], the keys; [S, P], the positions."""
    places = values.shape[2]
    if positions is None:
        positions = torch.arange(places, device="cpu").expand(len(values), places)
    else:
        positions = positions.unsqueeze(1).expand(len(values), places)
    if bool((keys.diff() > 0).all()):  # faster than to sort them
        return values, keys, positions
    samples, sample_of = keys.unique(return_inverse=True)
    if len(samples) == len(keys):
        return values, keys, positions
    sample_of, order = sample_of.sort(stable=True)
    positions = _by_group(positions[order], sample_of, -1)
    order = on_device(order, values.device)
    values = _by_group(values[order], sample_of, -math.inf)
    return values.movedim(1, 2).flatten(2), samples, positions.flatten(1)


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


def _entering(top: Columns, best: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Row and unit of the values [S, U] that may be among the largest; those of a unit in the order of rows."""
    largest, largest_keys, _ = top
    most = largest.shape[1]
    least = _least(largest[:, -1])
    least_key = largest_keys[:, -1]
    may_be_tied = bool((keys.min() < least_key).any())
    size = _block_size(len(best), most)
    in_blocks = best.unflatten(0, (-1, size))
    blocks = in_blocks.amax(1)
    stays_below = torch.lt if may_be_tied else torch.le  # neither holds for NaN
    block, units = _where_not(stays_below(blocks, least))
    are_many = len(units) > largest.numel()
    if are_many and len(blocks) >= most:  # they rule out each other
        of_blocks = blocks.topk(most, 0).values
        least_here = _least(of_blocks[-1])
        least_key = least_key.where(least_here <= least, _NO_KEY)
        least = least.maximum(least_here)
        may_be_tied = True
        stays_below = torch.lt
        block, units = _where_not(blocks < least)
    if not len(units):
        return block, units
    values = in_blocks[block, :, units]
    place, number = _where_not(stays_below(values, least[units, None]))
    rows = block[place] * size + number
    units = units[place]
    if may_be_tied:
        is_tied = best[rows, units] == least[units]
        is_later = keys[rows] >= least_key[units]
        enters = (is_tied & is_later).logical_not_()
        rows = rows[enters]
        units = units[enters]
    return rows, units


def _block_size(rows: int, most: int) -> int:
    """How many rows make a block: they divide the rows, and where they can leave `most` blocks."""
    rows_of_each = rows // most
    largest = min(_BLOCK, rows_of_each - rows_of_each % 4)
    for size in range(largest, 0, -4):
        if rows % size == 0:
            return size
    return 1


def _least(values: Tensor) -> Tensor:
    """What a value has to reach that may not be below these. Nothing is above NaN."""
    return values.nan_to_num(math.inf, math.inf, -math.inf)


def _where_not(is_below: Tensor) -> tuple[Tensor, ...]:
    return is_below.logical_not_().nonzero(as_tuple=True)


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
