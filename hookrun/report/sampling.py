"""Rows of captures of any size, read in bounded memory: some rows of some shards."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hookrun.data.info import SPLITS
from hookrun.errors import HookrunError
from hookrun.store.captures.read import StoredCapture, spread, stored_tensors
from hookrun.store.captures.shard import read_index

MOST_ROWS = 256
MOST_PARTS = 16
"""How many shards the rows of one capture are drawn from."""

MOST_BYTES = 12 * 2**20
"""Bytes of rows that are read of one capture; a capture with a single row above `LARGEST_ROW` is not read."""

LARGEST_ROW = 64 * 2**20

MOST_SUMMED = 4 * 2**30
"""Up to this size in bytes every row of a capture is read for its statistics."""

SUMMED_AT_ONCE = 4 * 2**20


class CapturedRows(NamedTuple):
    """Some rows of a capture, read.

    source: the rows, which say where each is from
    values: [rows, ...] float32 on the CPU; of complex numbers the absolute values
    """

    source: StoredCapture
    values: Tensor

    @property
    def by_token(self) -> bool:
        """Whether each row is of one token."""
        return bool((self.source.positions >= 0).all())

    def sample_of(self, row: int) -> tuple[str, int]:
        """Split and number of the sample of a row; the split is ``""`` if it is not known."""
        return self.source.splits[row], int(self.source.sample_ids[row])

    @property
    def name(self) -> str:
        """``val sample 17``, of the first row."""
        split, number = self.sample_of(0)
        return f"{split} sample {number}".strip()


@dataclass(frozen=True)
class Summary:
    """Statistics of the values of a capture.

    rows:      number of rows that were read
    count:     number of values; `finite` of them are finite, `zeros` exactly 0
    mean, std: of the finite values; std is divided by n, not n - 1
    low, high: the smallest and the largest finite value
    """

    rows: int
    count: int
    finite: int
    zeros: int
    mean: float
    std: float
    low: float
    high: float


def stored_captures(folder: Path) -> list[StoredCapture]:
    """The captured tensors in a folder's index, one for each dtype and shape; no shard is opened.

    Raises StoreError for a malformed index.
    """
    return [kind for capture in stored_tensors(folder, read_index(folder)) for kind in capture.by_kind()]


def summary(capture: StoredCapture, drawn: CapturedRows) -> Summary:
    """Statistics of all rows, or of the drawn rows if all rows have more than `MOST_SUMMED` bytes."""
    blocks: Iterable[Tensor] = [drawn.values]
    if len(drawn.values) < len(capture) and len(capture) * capture.row_bytes <= MOST_SUMMED:
        at_once = max(1, SUMMED_AT_ONCE // max(capture.row_bytes, 1))
        blocks = (_plain(rows) for part in capture.by_shard() for rows in part.batches(at_once))
    rows = count = zeros = 0
    parts = list[list[float]]()
    for block in blocks:
        values = block.double().flatten()
        rows, count = rows + len(block), count + len(values)
        values = values[values.isfinite()]
        if len(values):
            zeros += int((values == 0).sum())
            variance, mean = torch.var_mean(values, correction=0)
            parts.append([len(values), *map(float, (mean, variance, *values.aminmax()))])
    sizes, means, variances, lows, highs = torch.tensor(parts or [[0.0] * 5], dtype=torch.float64).T
    shares = sizes / sizes.sum().clamp(min=1)
    mean = (shares * means).sum()
    std = (shares * (variances + (means - mean).square())).sum().sqrt()
    return Summary(
        rows, count, int(sizes.sum()), zeros, float(mean), float(std), float(lows.min()), float(highs.max())
    )


def draw(capture: StoredCapture) -> CapturedRows:
    """Rows evenly spaced over the capture. Raises HookrunError if they are too large or can't be read."""
    if capture.row_bytes > LARGEST_ROW:
        raise HookrunError(f"one row has {capture.row_bytes / 1e6:,.0f} MB: too large to draw")
    wanted = max(1, min(MOST_ROWS, MOST_BYTES // max(capture.row_bytes, 1)))
    wanted -= (wanted - 1) % 3  # the rows at the thirds, drawn as images, are then the same in every capture
    some = capture.of_shards(min(MOST_PARTS, wanted))
    if not len(some):
        raise HookrunError("it has no rows")
    rows = some.chosen(torch.tensor(spread(range(len(some)), wanted)))
    return CapturedRows(rows, _plain(rows[:]))


def rows_of_samples(
    capture: StoredCapture, most: int, known: Container[tuple[str, int]], most_rows: int
) -> Iterator[CapturedRows]:
    """The rows of the first samples in the last epoch, from the latest step.

    None if rows are whole firings, or of a query and a key.

    most:      number of samples; those in `known` come first
    most_rows: number of rows of each sample, which are in the order of their tokens

    Raises HookrunError for a shard that can't be read.
    """
    size = capture.row_bytes
    if not capture.is_by_sample or size > LARGEST_ROW or not len(capture):
        return
    some = capture.of_shards(MOST_PARTS)
    if (some.keys >= 0).any():
        return
    epochs, splits, samples = some.epochs, some.split_numbers, some.sample_ids
    is_last = (epochs == epochs.max()) & (samples >= 0)
    pairs = sorted(
        torch.stack([splits[is_last], samples[is_last]], dim=1).unique(dim=0).tolist(),
        key=lambda pair: ((SPLITS[pair[0]] if pair[0] >= 0 else "", pair[1]) not in known, pair),
    )
    most_rows = max(1, min(most_rows, MOST_BYTES // max(size, 1)))
    for split, sample in pairs[: most if size <= MOST_BYTES else 1]:
        rows = (is_last & (splits == split) & (samples == sample)).nonzero().squeeze(1)
        for column in (-some.steps, some.calls):  # of the latest step the first call
            rows = rows[column[rows] == column[rows].min()]
        rows = rows[:most_rows]
        source = some.chosen(rows[some.positions[rows].argsort(stable=True)])
        yield CapturedRows(source, _plain(source[:]))


def _plain(rows: Tensor) -> Tensor:
    """The rows as float32; complex numbers as their absolute value."""
    return (rows.abs() if rows.is_complex() else rows).float()
