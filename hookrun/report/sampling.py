"""Rows of captures of any size, read in bounded memory: some rows of some shards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from hookrun.errors import HookrunError
from hookrun.store.captures import StoredCapture, read_captures
from hookrun.store.indexes import read_index
from hookrun.store.shard import Entry, Shard, row_bytes

T = TypeVar("T")

MOST_ROWS = 256
MOST_PARTS = 16
"""How many shards the rows of one capture are drawn from."""

MOST_BYTES = 12 * 2**20
"""Bytes of rows that are read of one capture; a capture with a single row above `LARGEST_ROW` is not read."""

LARGEST_ROW = 64 * 2**20

MOST_SUMMED = 4 * 2**30
"""Up to this size in bytes every row of a capture is read for its statistics."""

SUMMED_AT_ONCE = 16 * 2**20


@dataclass(frozen=True)
class Stream:
    """One captured tensor of one hook at one module, as the index describes it.

    rows, bytes: in total
    by:          what a row is: a `sample`, or a `firing`
    """

    hook: str
    module: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    by: str
    rows: int
    bytes: int
    parts: tuple[tuple[Shard, Entry], ...]

    @property
    def label(self) -> str:
        """The module, with the tensor's place in a container."""
        return f"{self.module}{' ' if self.path else ''}{self.path}"


@dataclass(frozen=True)
class DrawnRows:
    """Some rows of a stream, in order, float32 on the CPU.

    values:  [rows, ...]
    samples: [rows], -1 if a row is a whole firing
    steps, epochs, splits: [rows]
    positions: [rows], of the token in its sample; -1 if a row is not of one token
    """

    values: Tensor
    samples: Tensor
    steps: Tensor
    epochs: Tensor
    splits: Tensor
    positions: Tensor


@dataclass
class Figures:
    """Statistics of the values of a capture.

    count:     number of values; `finite` of them are finite, `zeros` exactly 0
    mean, std: of the finite values; std is divided by n, not n - 1
    low, high: the smallest and the largest finite value
    rows:      number of rows that were read
    """

    rows: int = 0
    count: int = 0
    finite: int = 0
    zeros: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    @property
    def std(self) -> float:
        """The standard deviation; 0 if no value is finite."""
        return math.sqrt(self.squares / self.finite) if self.finite else 0.0

    def add(self, rows: Tensor) -> None:
        """Add further rows [n, ...] to the statistics (Chan, Golub, LeVeque 1979)."""
        values = rows.double().flatten()
        self.rows += len(rows)
        self.count += len(values)
        finite = values.isfinite()
        if not finite.all():
            values = values[finite]
        if not len(values):
            return
        self.zeros += int((values == 0).sum())
        mean, total = float(values.mean()), self.finite + len(values)
        off = mean - self.mean
        self.squares += float(values.sub(mean).square().sum()) + off**2 * self.finite * len(values) / total
        self.mean += off * len(values) / total
        self.finite = total
        low, high = values.aminmax()
        self.low, self.high = min(self.low, float(low)), max(self.high, float(high))


def summed(folder: Path, stream: Stream, drawn: DrawnRows) -> Figures:
    """Statistics of all rows, or of the drawn rows if all rows have more than `MOST_SUMMED` bytes."""
    found = Figures()
    if stream.rows <= len(drawn.values) or stream.bytes > MOST_SUMMED:
        found.add(drawn.values)
        return found
    at_once = max(1, SUMMED_AT_ONCE // max(row_bytes(stream.dtype, stream.shape), 1))
    for shard, entry in stream.parts:
        for rows in capture_of(folder, replace(shard, entries=(entry,))).batches(at_once):
            found.add(plain(rows))
    return found


def streams(folder: Path) -> list[Stream]:
    """The captured tensors in a folder's index; no shard is opened. Raises StoreError for a malformed index."""
    shards, _ = read_index(folder)
    found = dict[tuple[str, str, str, str, tuple[int, ...]], list[tuple[Shard, Entry]]]()
    for shard in shards:
        for entry in shard.entries:
            key = (entry.hook, entry.module, entry.path, entry.dtype, entry.shape)
            found.setdefault(key, []).append((shard, entry))
    return [_stream(parts) for parts in found.values()]


def _stream(parts: Sequence[tuple[Shard, Entry]]) -> Stream:
    entry = parts[0][1]
    rows = sum(each.rows for _, each in parts)
    size = rows * row_bytes(entry.dtype, entry.shape)
    return Stream(
        entry.hook, entry.module, entry.path, entry.dtype, entry.shape, entry.by, rows, size, tuple(parts)
    )


def draw(folder: Path, stream: Stream) -> DrawnRows:
    """Rows evenly spaced over the stream. Raises HookrunError if they are too large or can't be read."""
    row = row_bytes(stream.dtype, stream.shape)
    if row > LARGEST_ROW:
        raise HookrunError(f"one row has {row / 1e6:,.0f} MB: too large to draw")
    wanted = max(1, min(MOST_ROWS, MOST_BYTES // max(row, 1)))
    wanted -= (
        wanted - 1
    ) % 3  # so that the rows at the thirds, drawn as images, are the same in every stream
    values, columns = list[Tensor](), list[Tensor]()
    parts = list(spread(stream.parts, min(MOST_PARTS, wanted)))
    places = torch.tensor(list(spread(range(sum(entry.rows for _, entry in parts)), wanted)))
    for shard, entry in parts:
        here, places = places[places < entry.rows], places[places >= entry.rows] - entry.rows
        if not len(here):
            continue
        capture = capture_of(folder, replace(shard, entries=(entry,)))
        values.append(plain(capture[here]))
        table = (capture.sample_ids, capture.steps, capture.epochs, capture.splits, capture.positions)
        columns.append(torch.stack([column[here] for column in table]))
    if not values:
        raise HookrunError("it has no rows")
    whole = torch.cat(columns, dim=1)
    return DrawnRows(torch.cat(values), *whole)


def capture_of(folder: Path, shard: Shard) -> StoredCapture:
    """The one tensor of a shard with a single entry."""
    found = read_captures(folder, [shard], {})
    (by_module,) = found.values()
    (leaf,) = by_module.values()
    if isinstance(leaf, StoredCapture):
        return leaf
    (inside,) = leaf.values()
    return inside


def plain(rows: Tensor) -> Tensor:
    """The rows as float32; complex numbers as their absolute value."""
    return (rows.abs() if rows.is_complex() else rows).float()


def spread(items: Sequence[T], most: int) -> Iterator[T]:
    """At most `most` of the items, evenly spaced, with the first and the last."""
    count = min(most, len(items))
    if count < 2:
        yield from items[:count]
        return
    yield from (items[n * (len(items) - 1) // (count - 1)] for n in range(count))
