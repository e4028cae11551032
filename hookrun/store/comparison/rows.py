"""The same rows of two captures, read in blocks, and how far they differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from hookrun.data.info import SPLITS
from hookrun.store.captures.read import StoredCapture
from hookrun.store.format import FIRING

BLOCK_BYTES = 2**24
"""The size in float64 of a block of rows of one capture that is read at once; a block has at least one row."""

Samples = Mapping[tuple[str, int], Mapping[str, Any]]
"""(split, sample) -> its line in samples.jsonl."""


@dataclass(frozen=True)
class MatchedRows:
    """Some rows of a capture, read when they are needed.

    rows: [n] int64, their numbers
    """

    capture: StoredCapture
    rows: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, *shape of a row)."""
        return (len(self.rows), *self.capture.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows."""
        return self.capture.dtype

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: slice) -> Tensor:
        return self.capture[self.rows[index]]


@dataclass(frozen=True)
class Pair:
    """Rows of the first run and the same rows of the other one; all rows of a side have one shape.

    order: [n] int64, ascending in the order of the rows' samples and tokens
    """

    rows: MatchedRows
    other: MatchedRows
    order: Tensor

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(place in the pair, rows, other rows) for each block."""
        elements = max(math.prod(self.rows.shape[1:]), 1)
        size = max(1, BLOCK_BYTES // (8 * elements))
        for start in range(0, len(self.rows), size):
            place = slice(start, start + size)
            yield place, self.rows[place], self.other[place]


def pairs(capture: StoredCapture, other: StoredCapture) -> list[Pair]:
    """The rows that both captures have, by sample, epoch, call and token; a row of a whole firing by its step.

    If a capture has rows of several shapes there is a pair for each two shapes. The n-th of several rows of the same
    sample is paired with the n-th of the other run.
    """
    sides = [(kind, _keys(kind)) for side in (capture, other) for kind in side.by_kind()]
    _, number = torch.cat([keys for _, keys in sides]).unique(dim=0, return_inverse=True)
    numbered = list(
        zip((kind for kind, _ in sides), number.split([len(keys) for _, keys in sides]), strict=True)
    )
    count, made = len(capture.by_kind()), list[Pair]()
    for (left, numbers), (right, others) in product(numbered[:count], numbered[count:]):
        place = torch.full((len(number),), -1)
        place[others] = torch.arange(len(others))
        rows = (place[numbers] >= 0).nonzero().squeeze(1)
        if len(rows):
            partner = place[numbers[rows]]
            made.append(Pair(MatchedRows(left, rows), MatchedRows(right, partner), numbers[rows]))
    return made


def _keys(capture: StoredCapture) -> Tensor:
    """[rows, keys]: what identifies a row in any run; batches and ranks may be others there."""
    samples = capture.sample_ids
    steps = torch.where(samples == FIRING, capture.steps, 0)
    named = [capture.epochs, steps, capture.splits, samples, capture.calls, capture.positions, capture.keys]
    keys = torch.stack(named, dim=1)
    _, group, counts = keys.unique(dim=0, return_inverse=True, return_counts=True)
    ordered = group.argsort(stable=True)
    repeated = torch.empty_like(group)
    repeated[ordered] = torch.arange(len(group)) - (counts.cumsum(0) - counts)[group[ordered]]
    return torch.cat([keys, repeated[:, None]], dim=1)


@dataclass
class Difference:
    """How far two tensors differ, summed over blocks of their rows.

    Sums leave out values that are not finite; NaN are counted.

    largest: the largest absolute difference of two elements, and where: (sample, token, index in the row or token)
    broken:  an element is not finite on one side only
    first:   (time, order, token) of the first row or token that differs, and its (sample, token)
    """

    rows: int = 0
    product: float = 0.0
    square: float = 0.0
    square_other: float = 0.0
    square_difference: float = 0.0
    nans: int = 0
    nans_other: int = 0
    largest: float = 0.0
    where: tuple[int | None, int | None, list[int]] | None = None
    broken: bool = False
    first: tuple[tuple[int, int, int], tuple[int | None, int | None]] | None = None

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between the two; None if one of them is zero."""
        norms = math.sqrt(self.square) * math.sqrt(self.square_other)
        return self.product / norms if norms > 0 else None

    @property
    def relative_l2(self) -> float:
        """The norm of the difference, divided by the norm of the first run's values; NaN if only one side has a NaN."""
        if self.broken and math.isfinite(self.square_difference):
            return math.nan
        return relative(math.sqrt(self.square_difference), math.sqrt(self.square))

    def add(self, cells: Cells, chosen: Tensor, tolerance: float) -> None:
        """Add the chosen cells of a block: [cells] bool."""
        self.rows += int(chosen.sum())
        self.product += float(cells.product[chosen].sum())
        self.square += float(cells.square[chosen].sum())
        self.square_other += float(cells.square_other[chosen].sum())
        self.square_difference += float(cells.square_difference[chosen].sum())
        self.nans += int(cells.nans[chosen].sum())
        self.nans_other += int(cells.nans_other[chosen].sum())
        self.broken |= bool(cells.broken[chosen].any())
        numbers = chosen.nonzero().squeeze(1)
        at = int(numbers[cells.largest[chosen].argmax()])
        if float(cells.largest[at]) > self.largest:
            self.largest = float(cells.largest[at])
            index = torch.unravel_index(cells.element[at], cells.shape) if cells.shape else ()
            self.where = (*cells.at(at), [int(place) for place in index])
        for number in (chosen & cells.differing(tolerance)).nonzero().squeeze(1).tolist():
            order = int(cells.times[number]), int(cells.order[number]), int(cells.tokens[number])
            if self.first is None or order < self.first[0]:
                self.first = order, cells.at(number)


def relative(difference: float, norm: float) -> float:
    """A difference divided by a norm; infinite if only the norm is zero."""
    return difference / norm if norm > 0 else (math.inf if difference > 0 else 0.0)


@dataclass(frozen=True)
class Cells:
    """The rows of a block, or each token of these rows, measured: all tensors are [cells].

    shape:   of a cell
    samples: the sample of each cell, `FIRING` if it has none; `tokens`: the position of its token, -1 if it has none
    times:   ascending from step to step of a run; `order`: from sample to sample
    element: the number of the element with the largest difference
    broken:  whether a value is not finite on one side only, or another one there
    unmasked, unmasked_difference: as `square` and `square_difference`, without masked attention scores
    """

    shape: tuple[int, ...]
    samples: Tensor
    tokens: Tensor
    times: Tensor
    order: Tensor
    product: Tensor
    square: Tensor
    square_other: Tensor
    square_difference: Tensor
    largest: Tensor
    element: Tensor
    nans: Tensor
    nans_other: Tensor
    broken: Tensor
    unmasked: Tensor
    unmasked_difference: Tensor

    def differing(self, tolerance: float) -> Tensor:
        """[cells] bool: where the norm of the difference is above the tolerance times the norm of the first run's."""
        return (self.unmasked_difference.sqrt() > tolerance * self.unmasked.sqrt()) | self.broken

    def at(self, number: int) -> tuple[int | None, int | None]:
        """The sample and the token of a cell."""
        sample, token = int(self.samples[number]), int(self.tokens[number])
        return None if sample == FIRING else sample, None if token < 0 else token


@dataclass(frozen=True)
class Compared:
    """The comparison of two captures.

    by_token:    position of a token -> the difference there; with the key None the whole difference
    notes:       what could not be compared, in words
    other_shape: rows of the same samples have other shapes
    """

    pairs: list[Pair]
    by_token: dict[int | None, Difference]
    notes: list[str]
    other_shape: bool


def compared(
    capture: StoredCapture,
    other: StoredCapture,
    samples: Samples,
    tolerance: float,
    *,
    by_token: bool = False,
) -> Compared:
    """Compare the rows of the same samples in two captures.

    samples:   the samples of the first run
    tolerance: the norm of a row's difference, divided by the norm of the first run's row, above which it differs
    by_token:  each position of a token by itself
    """
    matched, found, notes = pairs(capture, other), dict[int | None, Difference](), list[str]()
    shapes = [(list(pair.rows.shape[1:]), list(pair.other.shape[1:]), len(pair.rows)) for pair in matched]
    notes += [
        f"{rows} rows have shape {here}, other {there}" for here, there, rows in shapes if here != there
    ]
    for pair in matched:
        if pair.rows.shape != pair.other.shape or not math.prod(pair.rows.shape):
            continue
        for cells in cells_of(pair, samples):
            tokens = cells.tokens if by_token else torch.full_like(cells.tokens, -1)
            for token in tokens.unique().tolist():
                key = None if token < 0 else token
                found.setdefault(key, Difference()).add(cells, tokens == token, tolerance)
    common = sum(rows for *_, rows in shapes)
    if not common:
        notes.append(f"no sample in common: {_samples(capture)}, other {_samples(other)}")
    elif common < max(len(capture), len(other)):
        only, only_other = len(capture) - common, len(other) - common
        notes.append(
            f"{only} of {len(capture)} rows are only in the run, {only_other} of {len(other)} only in the other"
        )
    return Compared(matched, found, notes, any(here != there for here, there, _ in shapes))


def _samples(capture: StoredCapture) -> str:
    """``16 rows of val 0 to 15``."""
    ids, splits = capture.sample_ids, capture.splits.unique().tolist()
    names = " and ".join(SPLITS[split] for split in splits if split >= 0) or "samples"
    return f"{len(ids)} rows of {names} {int(ids.min())} to {int(ids.max())}"


def cells_of(pair: Pair, samples: Samples) -> Iterator[Cells]:
    """The cells of each block of a pair whose rows have the same shape."""
    capture, shape = pair.rows.capture, pair.rows.shape[1:]
    ids = capture.sample_ids[pair.rows.rows]
    positions, cell = positions_of(pair, samples), shape[1:]
    if positions is None:
        positions, cell = capture.positions[pair.rows.rows][:, None], shape
    epochs, splits, steps = (
        column[pair.rows.rows] for column in (capture.epochs, capture.splits, capture.steps)
    )
    times = (
        epochs * (len(SPLITS) + 1) + splits + 1
    ) * 2**32 + steps  # an epoch is validated after its training
    width, elements = positions.shape[1], math.prod(cell)
    for place, rows, others in pair.blocks():
        count = len(rows) * width
        yield Cells(
            cell,
            ids[place].repeat_interleave(width),
            positions[place].reshape(count),
            times[place].repeat_interleave(width),
            pair.order[place].repeat_interleave(width),
            **measured(rows.reshape(count, elements), others.reshape(count, elements)),
        )


def positions_of(pair: Pair, samples: Samples) -> Tensor | None:
    """[rows, tokens]: the position of each token in rows that hold whole sequences, -1 for padding; else None."""
    capture, (_, *shape) = pair.rows.capture, pair.rows.shape
    if len(shape) < 2 or (
        len(shape) > 2 and shape[0] == shape[1]
    ):  # an attention pattern has its heads there
        return None
    splits, ids = (column[pair.rows.rows].tolist() for column in (capture.splits, capture.sample_ids))
    found = torch.full((len(ids), shape[0]), -1)
    for row, (split, sample) in enumerate(zip(splits, ids, strict=True)):
        line = samples.get((SPLITS[split], sample), {}) if split >= 0 else {}
        count, (before, after) = len(line.get("tokens") or ()), line.get("padding", (0, 0))
        if not count or before + count + after != shape[0]:
            return None
        found[row, before : before + count] = torch.arange(count)
    return found


def measured(rows: Tensor, others: Tensor) -> dict[str, Tensor]:
    """What `Cells` holds of the values [cells, elements]."""
    dtype = torch.complex128 if rows.is_complex() or others.is_complex() else torch.float64
    left, right = rows.to(dtype), others.to(dtype)
    is_same = (left == right) | (left.isnan() & right.isnan())
    is_finite = left.isfinite() & right.isfinite()
    # An infinity on one side only is infinitely far away; NaN has no distance.
    apart = torch.where(is_same, 0, left - right).abs().nan_to_num(nan=0.0, posinf=math.inf)
    known, known_other = (torch.where(is_finite, side, 0) for side in (left, right))
    square, square_difference = known.abs().square(), apart.square()
    largest, element = apart.max(1)
    found = {
        "product": (known.conj() * known_other).real.sum(1),
        "square": square.sum(1),
        "square_other": known_other.abs().square().sum(1),
        "square_difference": square_difference.sum(1),
        "largest": largest,
        "element": element,
        "nans": left.isnan().sum(1),
        "nans_other": right.isnan().sum(1),
        "broken": (~is_same & ~is_finite).any(1),
    }
    masked = _is_lowest(rows) & _is_lowest(others)
    unmasked = (torch.where(masked, 0, each).sum(1) for each in (square, square_difference))
    return found | dict(zip(("unmasked", "unmasked_difference"), unmasked, strict=True))


def _is_lowest(values: Tensor) -> Tensor:
    """Where attention scores are masked: they have the lowest number of their dtype, beside which no other counts."""
    if not values.is_floating_point():
        return torch.zeros_like(values, dtype=torch.bool)
    return values.double() == torch.finfo(values.dtype).min
