"""The lines of a shard index: the files of captured rows, and the rows in each of them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hookrun.store.format import INDEX, STORED_DTYPES, VERSION
from hookrun.store.records import ShardRecord, checked

ALWAYS_WRITTEN = ("sample", "epoch", "step", "call")
"""The columns that every version writes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Rows of one tensor stream in one shard, in the order of recording.

    key:   name of the rows in the shard, a [rows, *shape] tensor; ``<key>.rows`` holds their [rows, columns]
           int64 table
    path:  the place of the tensor in the captured value: ``""`` for a bare tensor, else such as ``[0].logits``
    dtype: torch's name without ``torch.``
    shape: of one row
    by:    what a row is: one `sample` of a batch, or the whole value of one `firing` of the hook
    """

    key: str
    hook: str
    module: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    rows: int
    by: str


@dataclass(frozen=True, slots=True)
class Shard:
    """One line of a shard index: a file that is complete on disk, its size and hash, and its entries."""

    file: str
    sha256: str
    bytes: int
    columns: tuple[str, ...]
    entries: tuple[Entry, ...]

    def record(self) -> dict[str, Any]:
        """The line as a mapping for `encode`."""
        entries = [
            {name: getattr(entry, name) for name in Entry.__slots__} | {"shape": list(entry.shape)}
            for entry in self.entries
        ]
        return {
            "version": VERSION,
            "shard": self.file,
            "sha256": self.sha256,
            "bytes": self.bytes,
            "columns": list(self.columns),
            "entries": entries,
        }

    @classmethod
    def of(cls, record: Any) -> Shard:
        """Parse an index line; unknown keys are dropped.

        Raises ValueError for any other line, and if its rows need more bytes than the file has.
        """
        version = record.get("version") if isinstance(record, dict) else None
        if isinstance(version, int) and version > VERSION:
            raise ValueError(f"it has format {version}, this hookrun reads up to {VERSION}")
        try:
            line = checked(record, ShardRecord)
        except ValueError as error:
            raise ValueError(f"it does not describe a shard: {error}") from None
        if "/" in line.shard or "\0" in line.shard or line.shard in (".", "..", INDEX):
            raise ValueError(f"the shard {line.shard!r} lies outside of its folder or cannot be a file of it")
        if missing := [name for name in ALWAYS_WRITTEN if name not in line.columns]:
            raise ValueError(f"its rows do not say their {', '.join(missing)}")
        entries = tuple(
            Entry(
                each.key, each.hook, each.module, each.path, each.dtype, tuple(each.shape), each.rows, each.by
            )
            for each in line.entries
        )
        for entry in entries:
            if entry.dtype not in STORED_DTYPES:
                raise ValueError(f"unknown dtype {entry.dtype!r}, written by another version of hookrun")
        least = sum(_least_bytes(entry, len(line.columns)) for entry in entries)
        if least > line.bytes:
            raise ValueError(f"its rows need {least:,} bytes, and the shard has {line.bytes:,}")
        return cls(line.shard, line.sha256, line.bytes, tuple(line.columns), entries)


def row_bytes(dtype: str, shape: Sequence[int]) -> int:
    """The bytes of one row of a dtype in `STORED_DTYPES`."""
    bits = re.search(r"\d+", dtype)  # bool has no number and takes one byte
    return (int(bits[0]) // 8 if bits else 1) * math.prod(shape)


def _least_bytes(entry: Entry, columns: int) -> int:
    return entry.rows * (row_bytes(entry.dtype, entry.shape) + 8 * columns)
