"""The same rows of two captures, read in blocks, and how far they differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookrun.studies.kit.files import FIRING, StoredCapture
from hookrun.studies.kit.passes import SPLITS

BLOCK_BYTES = 2**24
"""The size in float64 of a block of rows of one capture that is read at once; a block has at least one row."""

Samples = Mapping[tuple[str, int], Mapping[str, Any]]
"""(split, sample) -> its line in samples.jsonl."""


class Pair(NamedTuple):
    """Rows of the first run and the same rows of the other one; all rows of a side have one shape."""

    rows: StoredCapture
    other: StoredCapture

    def places(self) -> list[slice]:
        """The places of the blocks in which the rows are read."""
        size = max(1, BLOCK_BYTES // (8 * max(math.prod(self.rows.shape[1:]), 1)))
        return [slice(start, start + size) for start in range(0, len(self.rows), size)]


def pairs(capture: StoredCapture, other: StoredCapture) -> Iterator[Pair]:
    """The rows that both captures have, by sample, epoch, call and token; a row of a whole firing by its step.

    If a capture has rows of several shapes there is a pair for each two shapes. The n-th of several rows of the same
    sample is paired with the n-th of the other run.
    """
    for left, right in product(capture.by_kind(), other.by_kind()):
        number = torch.cat([_keys(left), _keys(right)]).unique(dim=0, return_inverse=True)[1]
        numbers, others = number.split([len(left), len(right)])
        place = torch.full((len(number),), -1)
        place[others] = torch.arange(len(others))
        rows = (place[numbers] >= 0).nonzero().squeeze(1)
        if len(rows):
            yield Pair(left.chosen(rows), right.chosen(place[numbers[rows]]))


def _keys(capture: StoredCapture) -> Tensor:
    """[rows, keys]: what identifies a row in any run; batches and ranks may be others there."""
    samples = capture.sample_ids
    steps = torch.where(samples == FIRING, capture.steps, 0)
    named = [
        capture.epochs,
        steps,
        capture.split_numbers,
        samples,
        capture.calls,
        capture.positions,
        capture.keys,
    ]
    keys = torch.stack(named, dim=1)
    _, group, counts = keys.unique(dim=0, return_inverse=True, return_counts=True)
    ordered = group.argsort(stable=True)
    repeated = torch.empty_like(group)
    repeated[ordered] = torch.arange(len(group)) - (counts.cumsum(0) - counts)[group[ordered]]
    return torch.cat([keys, repeated[:, None]], dim=1)


def positions_of(rows: StoredCapture, samples: Samples) -> Tensor | None:
    """[rows, tokens]: the position of each token in rows that hold whole sequences, -1 for padding; else None."""
    _, *shape = rows.shape
    if len(shape) < 2 or (
        len(shape) > 2 and shape[0] == shape[1]
    ):  # an attention pattern has its heads there
        return None
    found = torch.full((len(rows), shape[0]), -1)
    columns = rows.split_numbers.tolist(), rows.sample_ids.tolist()
    for row, (split, sample) in enumerate(zip(*columns, strict=True)):
        line = samples.get((SPLITS[split], sample), {}) if split >= 0 else {}
        count, (before, after) = len(line.get("tokens") or ()), line.get("padding", (0, 0))
        if not count or before + count + after != shape[0]:
            return None
        found[row, before : before + count] = torch.arange(count)
    return found


_ROWS, _PRODUCT, _SQUARE, _SQUARE_OTHER, _APART, _NANS, _NANS_OTHER, _BROKEN = range(8)
"""Sums over the elements of rows. Values that are not finite are left out; `_BROKEN` counts those of one side only."""


@dataclass
class Difference:
    """How far rows differ.

    largest: the largest absolute difference of two elements
    where:   its sample, token, and index in the row or token; None if there is none
    first:   the sample and token that differ first, after their time; None if none differs
    """

    sums: Tensor = field(default_factory=lambda: torch.zeros(8, dtype=torch.float64))
    largest: float = 0.0
    where: tuple[int | None, int | None, list[int]] | None = None
    first: tuple[int, int, int] | None = None

    @property
    def relative_l2(self) -> float:
        """The norm of the difference, divided by the norm of the first run's values; NaN if only one side has a NaN."""
        norm, apart = math.sqrt(self.sums[_SQUARE]), math.sqrt(self.sums[_APART])
        if self.sums[_BROKEN] and apart < math.inf:
            return math.nan
        return apart / norm if norm > 0 else (math.inf if apart > 0 else 0.0)

    def numbers(self) -> dict[str, Any]:
        """The measured columns of the table of captures; the cosine is None if one side is zero."""
        norms = math.sqrt(self.sums[_SQUARE]) * math.sqrt(self.sums[_SQUARE_OTHER])
        sample, token, index = self.where or (None, None, [])
        return {
            "rows": int(self.sums[_ROWS]),
            "cosine": float(self.sums[_PRODUCT]) / norms if norms > 0 else None,
            "relative_l2": self.relative_l2,
            "largest": self.largest,
            "largest_sample": sample,
            "largest_token": token,
            "largest_index": " ".join(map(str, index)),
            "nans": int(self.sums[_NANS]),
            "nans_other": int(self.sums[_NANS_OTHER]),
        }


@dataclass(frozen=True)
class Compared:
    """The comparison of two captures.

    by_token: position of a token -> the difference there; -1 for the whole difference, and for padding
    notes:    what could not be compared, in words; `other_shape`: rows of the same samples have other shapes
    """

    pairs: list[Pair]
    by_token: dict[int, Difference]
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
    matched, found, notes = list(pairs(capture, other)), dict[int, Difference](), list[str]()
    for pair in matched:
        here, there = list(pair.rows.shape[1:]), list(pair.other.shape[1:])
        if here != there:
            notes.append(f"{len(pair.rows)} rows have shape {here}, other {there}")
        elif math.prod(here):
            _add(found, pair, positions_of(pair.rows, samples), tolerance, by_token=by_token)
    other_shape, common = bool(notes), sum(len(pair.rows) for pair in matched)
    only, only_other = len(capture) - common, len(other) - common
    if not common:
        spans = [f"{len(each)} rows from {each.names[0]} to {each.names[-1]}" for each in (capture, other)]
        notes.append(f"no sample in common: {spans[0]}, other {spans[1]}")
    elif only or only_other:
        notes.append(
            f"{only} of {len(capture)} rows are only here, {only_other} of {len(other)} only in the other run"
        )
    return Compared(matched, found, notes, other_shape)


def _add(
    found: dict[int, Difference], pair: Pair, positions: Tensor | None, tolerance: float, *, by_token: bool
) -> None:
    """Add the rows of a pair, or the tokens that the rows hold, to the differences, block by block."""
    rows = pair.rows
    shape = rows.shape[1:] if positions is None else rows.shape[2:]
    tokens = rows.positions[:, None] if positions is None else positions
    # an epoch is validated after its training
    passes = rows.epochs * (len(SPLITS) + 1) + rows.split_numbers + 1
    times = passes * 2**32 + rows.steps
    of_rows = (column[:, None].expand_as(tokens) for column in (times, rows.sample_ids))
    about = torch.stack([*of_rows, tokens], dim=2)
    for place in pair.places():
        cells = about[place].reshape(-1, 3)
        left, right = (side[place].reshape(len(cells), -1) for side in (pair.rows, pair.other))
        sums, apart, differs = measured(left, right, tolerance)
        groups = cells[:, 2] if by_token else torch.full((len(cells),), -1)
        for token in groups.unique().tolist():
            difference, chosen = found.setdefault(token, Difference()), groups == token
            difference.sums += sums[chosen].sum(0)
            largest, at = apart[chosen].max(1)[0].max(0)
            if largest > difference.largest:
                sample, position = cells[chosen][at, 1:].tolist()
                index = torch.unravel_index(apart[chosen][at].argmax(), shape) if shape else ()
                difference.largest = float(largest)
                difference.where = known(sample), known(position), [int(each) for each in index]
            firsts = map(tuple, cells[chosen & differs].tolist())
            difference.first = min((*firsts, *filter(None, [difference.first])), default=None)


def known(number: int) -> int | None:
    """The number of a sample or token; None if there is none, which a table says with -1."""
    return number if number >= 0 else None


def measured(rows: Tensor, others: Tensor, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """Sums [cells, 8], absolute differences [cells, elements] and which cells differ [cells], of [cells, elements]."""
    dtype = torch.complex128 if rows.is_complex() or others.is_complex() else torch.float64
    left, right = rows.to(dtype), others.to(dtype)
    is_same = (left == right) | (left.isnan() & right.isnan())
    is_finite = left.isfinite() & right.isfinite()
    # An infinity on one side only is infinitely far away; NaN has no distance.
    apart = torch.where(is_same, 0, left - right).abs().nan_to_num(nan=0.0, posinf=math.inf)
    finite, finite_other = (torch.where(is_finite, side, 0) for side in (left, right))
    square, square_apart = finite.abs().square(), apart.square()
    broken = ~is_same & ~is_finite
    product, ones = (finite.conj() * finite_other).real, torch.ones(len(rows), dtype=torch.float64)
    parts = product, square, finite_other.abs().square(), square_apart, left.isnan(), right.isnan(), broken
    sums = torch.stack([ones, *(part.sum(1) for part in parts)], dim=1)
    # Masked attention scores are so large that no other difference would count beside them.
    masked = _is_lowest(rows) & _is_lowest(others)
    norm, norm_apart = (torch.where(masked, 0, each).sum(1).sqrt() for each in (square, square_apart))
    return sums, apart, (norm_apart > tolerance * norm) | broken.any(1)


def _is_lowest(values: Tensor) -> Tensor:
    lowest = torch.finfo(values.dtype).min if values.is_floating_point() else -math.inf
    return values.real.to(torch.float64) == lowest
