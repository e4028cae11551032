"""The rows of a capture as vectors, read in blocks; sums and products of them; the memory that an analysis needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from hookrun.errors import HookrunError
from hookrun.store.captures.read import StoredCapture

READING = 4
"""The number of blocks in memory at once: two in float64, and the two captured blocks they are made from."""

BYTES = 8
"""The bytes of a float64."""

_SHARE = 8
"""A block that is read at once takes at most 1/_SHARE of the allowed memory, or one row."""


@dataclass(frozen=True)
class Projection:
    """A random projection: each feature is added, with a random sign, to one of `to` sums.

    It preserves inner products in expectation and needs no matrix: the count sketch of Charikar, Chen, Farach-Colton
    (2002).
    """

    to: int
    seed: int

    def __str__(self) -> str:
        return f"random projection (count sketch) to {self.to:,} features, seed {self.seed}"


@dataclass(frozen=True)
class Features:
    """Vectors [rows, width] in float64: the rows of a capture, flattened, and optionally projected and standardized.

    Methods take row numbers in ascending order, so that neighbouring rows are read at once.

    name:        the module path
    capture:     rows of any shape and dtype; a tensor [rows, ...] is accepted too
    block_bytes: the size of a block that is read at once; a block has at least one row
    projection:  a projection to fewer features; None: no projection
    mean:        [width], subtracted from each row; None: nothing is subtracted
    scale:       [width], by which each row is then divided; None: not divided
    """

    name: str
    capture: StoredCapture | Tensor
    block_bytes: int
    projection: Projection | None = None
    mean: Tensor | None = None
    scale: Tensor | None = None

    @classmethod
    def within(cls, most_bytes: int, name: str, capture: StoredCapture) -> Features:
        """The rows of a capture for an analysis that may take this many bytes of memory."""
        return cls(name, capture, most_bytes // _SHARE)

    def __len__(self) -> int:
        return len(self.capture)

    @cached_property
    def captured(self) -> int:
        """How many real numbers a captured row has; a complex number counts as two."""
        count = torch.Size(self.capture.shape[1:]).numel()
        return 2 * count if self.capture.dtype.is_complex else count

    @property
    def width(self) -> int:
        """The number of features after the projection."""
        return self.captured if self.projection is None else self.projection.to

    @property
    def rows_at_once(self) -> int:
        """The number of rows in a block."""
        return max(1, self.block_bytes // (BYTES * max(self.captured, 1)))

    def read(self, rows: Tensor) -> Tensor:
        """[n, width] float64: the rows with the numbers `rows` [n]."""
        first, last = int(rows[0]), int(rows[-1])
        found = self.capture[first : last + 1].reshape(last + 1 - first, -1)[rows - first]
        values = (torch.view_as_real(found).flatten(1) if found.is_complex() else found).double()
        if self._sketch is not None:
            buckets, signs = self._sketch
            values = values.new_zeros(len(rows), self.width).index_add_(1, buckets, values.mul_(signs))
        if self.mean is not None:
            values -= self.mean
        if self.scale is not None:
            values /= self.scale
        return values

    def blocks(self, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """(slice of `rows`, the vectors of these rows) for each block."""
        start = 0
        while start < len(rows):
            stop = int(torch.searchsorted(rows, int(rows[start]) + self.rows_at_once))
            yield slice(start, stop), self.read(rows[start:stop])
            start = stop

    def whole(self, rows: Tensor) -> Tensor:
        """[n, width] float64: the rows in one tensor."""
        found = torch.empty(len(rows), self.width, dtype=torch.float64)
        for here, values in self.blocks(rows):
            found[here] = values
        return found

    def centered(self, rows: Tensor) -> Features:
        """These features minus their mean over the rows. HookrunError if a value is not finite."""
        first = self.read(rows[:1])[0]
        total = torch.zeros(self.width, dtype=torch.float64)
        for _, values in self.blocks(rows):
            # The first row is subtracted so that features that do not vary become exactly 0.
            total += values.sub_(first).sum(0)
        mean = first + total / len(rows)
        if not mean.isfinite().all():
            bad = sum(int((~values.isfinite()).any(1).sum()) for _, values in self.blocks(rows))
            raise HookrunError(
                f"{self.name}: {bad} of {len(rows)} rows hold values that are not finite, which a linear model "
                "cannot use"
            )
        return replace(self, mean=mean)

    def standardized(self, rows: Tensor) -> Features:
        """These features with mean 0 and variance 1 over the rows; a feature that does not vary becomes 0.

        Raises HookrunError if a value is not finite.
        """
        centered = self.centered(rows)
        squares = torch.zeros(self.width, dtype=torch.float64)
        for _, values in centered.blocks(rows):
            squares += values.square_().sum(0)
        variance = squares / len(rows)
        assert centered.mean is not None
        rounding = len(rows) * torch.finfo(torch.float64).eps
        is_constant = variance <= rounding * variance + (rounding * centered.mean) ** 2
        return replace(centered, scale=torch.where(is_constant, 1.0, variance.sqrt()))

    def weights(self, combined: Tensor, rows: Tensor) -> Tensor:
        """[n, width] float64: weighted sums of the rows, with the weights `combined` [rows, n]."""
        found = torch.zeros(combined.shape[1], self.width, dtype=torch.float64)
        for here, values in self.blocks(rows):
            found.addmm_(combined[here].T, values)
        return found

    def unprojected(self, weights: Tensor) -> Tensor:
        """[n, captured]: linear weights [n, width] of these features, as weights of the captured features."""
        if self._sketch is None:
            return weights
        buckets, signs = self._sketch
        return weights[:, buckets] * signs

    @cached_property
    def _sketch(self) -> tuple[Tensor, Tensor] | None:
        """Of each captured feature, the sum to which it is added and its sign, both [captured]; None: no projection."""
        if self.projection is None:
            return None
        drawn = torch.Generator().manual_seed(self.projection.seed)
        buckets = torch.randint(self.projection.to, (self.captured,), generator=drawn)
        signs = torch.randint(2, (self.captured,), generator=drawn).double() * 2 - 1
        return buckets, signs


def gram(features: Features, rows: Tensor, others: Tensor | None = None) -> Tensor:
    """[rows, others] float64: the inner products of rows with other rows; None: with `rows` themselves."""
    partners = rows if others is None else others
    found = torch.empty(len(rows), len(partners), dtype=torch.float64)
    for here, left in features.blocks(rows):
        start = here.start if others is None else 0
        for place, right in features.blocks(partners[start:]):
            there = slice(place.start + start, place.stop + start)
            products = left @ right.T
            found[here, there] = products
            if others is None:
                found[there, here] = products.T
    return found


def reading_bytes(features: Sequence[Features]) -> int:
    """The bytes needed to read blocks of rows and project them."""
    blocks = max(each.rows_at_once * each.captured * BYTES for each in features)
    sketch = max(2 * BYTES * each.captured if each.projection is not None else 0 for each in features)
    return READING * blocks + sketch
