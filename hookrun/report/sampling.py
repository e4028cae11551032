"""Rows of captures of any size, read in bounded memory: some rows of some shards."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hookrun.data.info import SPLITS
from hookrun.errors import HookrunError
from hookrun.store.captures.read import MOST_SHARDS, StoredCapture, stored_tensors
from hookrun.store.captures.shard import read_index

MOST_ROWS = 256
MOST_BYTES = 12 * 2**20
"""Bytes of rows that are read of one capture; a capture with a single row above `LARGEST_ROW` is not read."""

LARGEST_ROW = 64 * 2**20

MOST_SUMMED = 4 * 2**30
"""Up to this size in bytes every row of a capture is read for its statistics."""

SUMMED_AT_ONCE = 4 * 2**20


class DrawnRows(NamedTuple):
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


@dataclass
class Summary:
    """Statistics of the values of a capture.

    rows:      number of rows that were read
    count:     number of values; `finite` of them are finite, `zeros` exactly 0
    mean, variance: of the finite values; the variance is divided by n, not n - 1
    low, high: the smallest and the largest finite value
    """

    rows: int = 0
    count: int = 0
    finite: int = 0
    zeros: int = 0
    mean: float = 0.0
    variance: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def add(self, rows: Tensor) -> None:
        """Add the values of rows [rows, ...]."""
        values = rows.double().flatten()
        self.rows += len(rows)
        self.count += len(values)
        values = values[values.isfinite()]
        if not len(values):
            return
        self.finite += len(values)
        self.zeros += int((values == 0).sum())
        self.low = min(self.low, float(values.min()))
        self.high = max(self.high, float(values.max()))
        variance, mean = torch.var_mean(values, correction=0)
        share = len(values) / self.finite
        difference = float(mean) - self.mean
        self.mean += share * difference
        self.variance += share * (float(variance) - self.variance + (1 - share) * difference * difference)

    @property
    def std(self) -> float:
        """The standard deviation of the finite values."""
        return math.sqrt(self.variance)


def stored_captures(folder: Path) -> list[StoredCapture]:
    """The captured tensors in a folder's index, one for each dtype and shape; no shard is opened.

    Raises StoreError for a malformed index.
    """
    captures = stored_tensors(folder, read_index(folder))
    return list(chain.from_iterable(capture.by_kind() for capture in captures))


def summary(capture: StoredCapture, drawn: DrawnRows) -> Summary:
    """Statistics of all rows, or of the drawn rows if all rows have more than `MOST_SUMMED` bytes."""
    statistics = Summary()
    if len(drawn.values) == len(capture) or len(capture) * capture.row_bytes > MOST_SUMMED:
        statistics.add(drawn.values)
        return statistics
    at_once = max(1, SUMMED_AT_ONCE // max(capture.row_bytes, 1))
    for part in capture.by_shard():
        for rows in part.batches(at_once):
            statistics.add(_plain(rows))
    return statistics


def draw(capture: StoredCapture) -> DrawnRows:
    """Rows evenly spaced over the capture. Raises HookrunError if they are too large or can't be read."""
    if capture.row_bytes > LARGEST_ROW:
        raise HookrunError(f"one row has {capture.row_bytes / 1e6:,.0f} MB: too large to draw")
    wanted = max(1, min(MOST_ROWS, MOST_BYTES // max(capture.row_bytes, 1)))
    wanted -= (wanted - 1) % 3  # the rows at the thirds, drawn as images, are then the same in every capture
    rows = capture.sample(wanted)
    if not len(rows):
        raise HookrunError("it has no rows")
    return DrawnRows(rows, _plain(rows[:]))


def rows_of_samples(
    capture: StoredCapture, most: int, preferred: Container[tuple[str, int]], most_rows: int
) -> Iterator[DrawnRows]:
    """The rows of the first samples in the last epoch, from the latest step.

    None if rows are whole firings, or of a query and a key.

    most:      number of samples; those in `preferred` come first
    most_rows: number of rows of each sample, which are in the order of their tokens

    Raises HookrunError for a shard that can't be read.
    """
    size = capture.row_bytes
    if not capture.is_by_sample or size > LARGEST_ROW or not len(capture):
        return
    some = capture.of_shards(MOST_SHARDS)
    if (some.keys >= 0).any():
        return
    samples = torch.stack([some.split_numbers, some.sample_ids], dim=1)
    is_last = (some.epochs == some.epochs.max()) & (some.sample_ids >= 0)

    def order(pair: list[int]) -> tuple[bool, list[int]]:
        split, sample = pair
        name = SPLITS[split] if split >= 0 else ""
        return (name, sample) not in preferred, pair

    pairs = sorted(samples[is_last].unique(dim=0).tolist(), key=order)
    most_rows = max(1, min(most_rows, MOST_BYTES // max(size, 1)))
    if size > MOST_BYTES:
        most = 1
    for pair in pairs[:most]:
        rows = (is_last & (samples == torch.tensor(pair)).all(1)).nonzero().squeeze(1)
        latest = some.steps[rows] == some.steps[rows].max()
        rows = rows[latest]
        first_call = some.calls[rows] == some.calls[rows].min()
        rows = rows[first_call][:most_rows]
        source = some.chosen(rows[some.positions[rows].argsort(stable=True)])
        yield DrawnRows(source, _plain(source[:]))


def _plain(rows: Tensor) -> Tensor:
    """The rows as float32; complex numbers as their absolute value."""
    if rows.is_complex():
        rows = rows.abs()
    return rows.float()
