"""The same rows of two captures, read in blocks, and how far they differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookrun.engine.values import fingerprints
from hookrun.studies.kit.files import FIRING, StoredCapture
from hookrun.studies.kit.passes import SPLITS

BLOCK_BYTES = 2**24
"""The size in float64 of a block of rows of one capture that is read at once; a block has at least one row."""

Samples = Mapping[tuple[str, int], Mapping[str, Any]]
"""(split, sample) -> its line in samples.jsonl."""

Counts = tuple[int, int]
"""Of the projections of the fingerprints that each run kept in place of rows; 0: it kept the rows."""

Moment = tuple[float, int, int]
"""The time, the sample and the token of a row; -1 where it has none."""

NEVER: Moment = (math.inf, -1, -1)


class Pair(NamedTuple):
    """Rows of the first run and the same rows of the other one; all rows of a side have one shape.

    order:  the dimensions of the other rows, 0 is the rows, in the order of the first run's; empty: as they are
    counts: 0, 0: rows are compared element by element; else by fingerprints, which are taken where rows were kept
    """

    rows: StoredCapture
    other: StoredCapture
    order: Sequence[int] = ()
    counts: Counts = (0, 0)

    @property
    def projections(self) -> int:
        """Of the fingerprints by which rows are compared; 0: rows are compared element by element."""
        return max(self.counts)

    @property
    def shapes(self) -> list[list[int]]:
        """The shape of a row of each run as it is compared."""
        return [list(none.shape[1:]) for none in self.values(slice(0, 0))]

    def places(self) -> list[slice]:
        """The places of the blocks in which the rows are read."""
        elements = max(math.prod(side.shape[1:]) for side in (self.rows, self.other))
        size = max(1, BLOCK_BYTES // (8 * max(elements, 1)))
        return [slice(start, start + size) for start in range(0, len(self.rows), size)]

    def values(self, place: slice) -> list[Tensor]:
        """The rows of both runs at a place as they are compared."""
        values = [self.rows[place], self.other[place]]
        if self.order:
            values[1] = values[1].permute(*self.order)
        for side, count in enumerate(self.counts):
            if count < self.projections:
                values[side] = fingerprints.fingerprints(values[side], self.projections)
        return values


def pairs(
    capture: StoredCapture, other: StoredCapture, order: Sequence[int], counts: Counts
) -> Iterator[Pair]:
    """The rows that both captures have, by sample, epoch, call and token; a row of a whole firing by its step.

    If a capture has rows of several shapes there is a pair for each two shapes. The n-th of several rows of the same
    sample is paired with the n-th of the other run.

    order: see `Pair`
    """
    for left, right in product(capture.by_kind(), other.by_kind()):
        keys = torch.cat([_keys(left), _keys(right)])
        _, number = keys.unique(dim=0, return_inverse=True)  # of each row, equal for rows of the same key
        numbers, others = number.split([len(left), len(right)])
        place = torch.full((len(number),), -1)
        place[others] = torch.arange(len(others))
        rows = (place[numbers] >= 0).nonzero().squeeze(1)
        if len(rows):
            are_kept = _may_be_fingerprints(left, counts[0]) and _may_be_fingerprints(right, counts[1])
            chosen = left.chosen(rows), right.chosen(place[numbers[rows]])
            yield Pair(*chosen, order, counts if are_kept else (0, 0))


def _may_be_fingerprints(rows: StoredCapture, count: int) -> bool:
    """Whether rows may be fingerprints, if a run kept any: of integers the rows themselves are kept."""
    return not count or (rows.dtype.is_floating_point and rows.shape[1:] == (count + 2,))


def _keys(capture: StoredCapture) -> Tensor:
    """[rows, keys]: what identifies a row in any run; batches and ranks may be others there."""
    samples = capture.sample_ids
    steps = torch.where(samples == FIRING, capture.steps, 0)
    moments = [capture.epochs, steps, capture.split_numbers, samples, capture.calls]
    keys = torch.stack([*moments, capture.positions, capture.keys], dim=1)
    _, group = keys.unique(dim=0, return_inverse=True)
    ordered, order = group.sort(stable=True)
    repeated = torch.empty_like(group)
    repeated[order] = torch.arange(len(group)) - torch.searchsorted(ordered, ordered)
    return torch.column_stack([keys, repeated])


def positions_of(rows: StoredCapture, samples: Samples) -> Tensor | None:
    """[rows, tokens]: the position of each token in rows that hold whole sequences, -1 for padding; else None."""
    shape = rows.shape[1:]
    is_pattern = len(shape) > 2 and shape[0] == shape[1]  # of attention: its heads are there
    if len(shape) < 2 or is_pattern:
        return None
    positions = torch.full((len(rows), shape[0]), -1)
    for row, sample in enumerate(zip(rows.splits, rows.sample_ids.tolist(), strict=True)):
        line = samples.get(sample, {})
        count = len(line.get("tokens") or ())
        before, after = line.get("padding", (0, 0))
        if not count or before + count + after != shape[0]:
            return None
        positions[row, before : before + count] = torch.arange(count)
    return positions


@dataclass
class Difference:
    """How far rows differ.

    sums:    those of `measured`
    largest: the largest absolute difference of two elements
    where:   its sample, token, and index in the row or token
    first:   the row or token that differs first
    """

    rows: int = 0
    sums: Tensor = field(default_factory=lambda: torch.zeros(7, dtype=torch.float64))
    largest: float = 0.0
    where: tuple[int | None, int | None, str] = (None, None, "")
    first: Moment = NEVER

    @property
    def relative_l2(self) -> float:
        """The norm of the difference, divided by the norm of the first run's values; NaN if only one side has a NaN."""
        _, square, _, apart, _, _, broken = self.sums.tolist()
        if broken and apart < math.inf:
            return math.nan
        if square > 0:
            return math.sqrt(apart) / math.sqrt(square)
        return math.inf if apart > 0 else 0.0

    def add(
        self, shape: Sequence[int], moments: Tensor, sums: Tensor, apart: Tensor, differs: Tensor
    ) -> None:
        """Add n rows or tokens of a shape.

        moments: [n, 3] the time, the sample and the token of each; sums, apart, differs: see `measured`
        """
        self.rows += len(moments)
        self.sums += sums.sum(0)
        largest, at = apart.amax(1).max(0)
        if largest > self.largest:
            _, sample, token = moments[at].tolist()
            index = torch.unravel_index(apart[at].argmax(), shape) if shape else ()
            self.largest = float(largest)
            self.where = known(sample), known(token), " ".join(str(int(each)) for each in index)
        self.first = min([self.first, *map(tuple, moments[differs].tolist())])

    def numbers(self) -> dict[str, Any]:
        """The measured columns of the table of captures; the cosine is None if one side is zero."""
        product, square, square_other, _, nans, nans_other, _ = self.sums.tolist()
        norms = math.sqrt(square) * math.sqrt(square_other)
        sample, token, index = self.where
        return {
            "rows": self.rows,
            "cosine": product / norms if norms > 0 else None,
            "relative_l2": self.relative_l2,
            "largest": self.largest,
            "largest_sample": sample,
            "largest_token": token,
            "largest_index": index,
            "nans": int(nans),
            "nans_other": int(nans_other),
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
    other_shape: bool = False

    @property
    def first(self) -> Moment:
        """What differs first; -1 where it is not known."""
        first = min((each.first for each in self.by_token.values()), default=NEVER)
        return (0, -1, -1) if first == NEVER and self.other_shape else first


def compared(
    capture: StoredCapture,
    other: StoredCapture,
    samples: Samples,
    tolerance: float,
    *,
    by_token: bool = False,
    order: Sequence[int] = (),
    counts: Counts = (0, 0),
) -> Compared:
    """Compare the rows of the same samples in two captures.

    samples:   the samples of the first run
    tolerance: the norm of a row's difference, divided by the norm of the first run's row, above which it differs
    by_token:  each position of a token by itself
    order:     see `Pair`
    """
    matched = list(pairs(capture, other, order, counts))
    by_position: dict[int, Difference] = {}
    notes: list[str] = []
    for pair in matched:
        shape, other_shape = pair.shapes
        if shape != other_shape:
            notes.append(f"{len(pair.rows)} rows have shape {shape}, other {other_shape}")
        elif math.prod(shape):
            positions = None if pair.projections else positions_of(pair.rows, samples)
            _add(by_position, pair, positions, tolerance, by_token=by_token)
    has_other_shape = bool(notes)
    common = sum(len(pair.rows) for pair in matched)
    only = len(capture) - common
    only_other = len(other) - common
    if not common:
        notes.append(f"no sample in common: {_span(capture)}, other {_span(other)}")
        if capture.is_by_sample and _has_split(capture) != _has_split(other):
            notes.append("only one of the runs knows its split: a loop of one's own sets `hooks.split`")
    elif only or only_other:
        notes.append(
            f"{only} of {len(capture)} rows are only here, {only_other} of {len(other)} only in the other run"
        )
    return Compared(matched, by_position, notes, has_other_shape)


def _span(capture: StoredCapture) -> str:
    return f"{len(capture)} rows from {capture.names[0]} to {capture.names[-1]}"


def _has_split(capture: StoredCapture) -> bool:
    return bool((capture.split_numbers >= 0).any())


def _add(
    differences: dict[int, Difference],
    pair: Pair,
    positions: Tensor | None,
    tolerance: float,
    *,
    by_token: bool,
) -> None:
    """Add the rows of a pair, or the tokens that the rows hold, to the differences, block by block."""
    rows = pair.rows
    if positions is None:
        tokens = rows.positions[:, None]
        shape = rows.shape[1:]
    else:
        tokens = positions
        shape = rows.shape[2:]
    # an epoch is validated after its training
    passes = rows.epochs * (len(SPLITS) + 1) + rows.split_numbers + 1
    times = passes * 2**32 + rows.steps
    about = torch.broadcast_tensors(times[:, None], rows.sample_ids[:, None], tokens)
    moments = torch.stack(about, dim=2)
    for place in pair.places():
        cells = moments[place].reshape(-1, 3)
        left, right = (side.reshape(len(cells), -1) for side in pair.values(place))
        measure = measured_by_fingerprints if pair.projections else measured
        measures = cells, *measure(left, right, tolerance)
        groups = cells[:, 2] if by_token else torch.full((len(cells),), -1)
        for token in groups.unique().tolist():
            chosen = groups == token
            difference = differences.setdefault(token, Difference())
            difference.add(shape, *(each[chosen] for each in measures))


def known(number: int) -> int | None:
    """The number of a sample or token; None if there is none, which a table says with -1."""
    return number if number >= 0 else None


def measured(rows: Tensor, others: Tensor, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """Sums [cells, 7], absolute differences [cells, elements] and which cells differ [cells], of [cells, elements].

    The sums are the product, the square of each side and of the difference, all of finite elements; the NaNs of each
    side; and how many elements are not finite and not the same on both sides.
    """
    dtype = torch.complex128 if rows.is_complex() or others.is_complex() else torch.float64
    left = rows.to(dtype)
    right = others.to(dtype)
    nans = left.isnan()
    other_nans = right.isnan()
    is_same = (left == right) | (nans & other_nans)
    is_finite = left.isfinite() & right.isfinite()
    broken = ~is_same & ~is_finite
    # An infinity on one side only is infinitely far away; NaN has no distance.
    apart = torch.where(is_same, 0, left - right).abs().nan_to_num(nan=0.0, posinf=math.inf)
    left = torch.where(is_finite, left, 0)
    right = torch.where(is_finite, right, 0)
    square = left.abs().square()
    square_apart = apart.square()
    products = (left.conj() * right).real.sum(1)
    squares = [square.sum(1), right.abs().square().sum(1), square_apart.sum(1)]
    sums = torch.stack([products, *squares, nans.sum(1), other_nans.sum(1), broken.sum(1)], dim=1)
    # Masked attention scores are so large that no other difference would count beside them.
    masked = _is_lowest(rows) & _is_lowest(others)
    norm = torch.where(masked, 0, square).sum(1).sqrt()
    norm_apart = torch.where(masked, 0, square_apart).sum(1).sqrt()
    return sums, apart, (norm_apart > tolerance * norm) | broken.any(1)


def measured_by_fingerprints(rows: Tensor, others: Tensor, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """The same of fingerprints [cells, projections + 2], estimated; differences of elements are not known: zeros."""
    found = fingerprints.difference(rows, others)
    square = rows[:, -2].double().square()
    square_other = others[:, -2].double().square()
    apart = found.distance.double().square()
    product = (square + square_other - apart) / 2
    nothing = torch.zeros_like(square)
    terms = [product, square, square_other, apart, nothing, nothing, found.distance.isnan()]
    sums = torch.stack(terms, dim=1).nan_to_num(nan=0.0, posinf=math.inf)
    return sums, nothing[:, None], ~(found.relative <= tolerance)


def _is_lowest(values: Tensor) -> Tensor:
    lowest = torch.finfo(values.dtype).min if values.is_floating_point() else -math.inf
    return values.real.to(torch.float64) == lowest
