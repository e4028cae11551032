"""The index of a folder of shards: a line for each file of captured rows, with the rows in it."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, Strict, StringConstraints, model_validator
from pydantic.dataclasses import dataclass

from hookrun.store.files import StoreError, names_inside, read_lines
from hookrun.store.format import INDEX, STORED_DTYPES, VERSION
from hookrun.store.records import Count, Listing, Name, Sha256, fitting

ALWAYS_WRITTEN = ("sample", "epoch", "step", "call")
"""The columns that every version writes."""

_OF_RANK = re.compile(r"index_[1-9]\d{0,5}\.jsonl")


RowKind = Literal["sample", "firing"]
"""What a row is: one `sample` of a batch, or the whole value of one `firing` of the hook."""

# Not strict: a strict dataclass is not made from a mapping.
_CONFIG = ConfigDict(extra="ignore", defer_build=True)
_Count = Annotated[Count, Strict()]
_Shared = Annotated[Name, AfterValidator(sys.intern)]
"""A text that many entries have: it is kept in memory once."""


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Entry:
    """Rows of one tensor stream in one shard, in the order of recording. An index may have hundreds of thousands.

    key:   name of the rows in the shard, a [rows, *shape] tensor; ``<key>.rows`` holds their [rows, columns]
           int64 table
    path:  the place of the tensor in the captured value: ``""`` for a bare tensor, else such as ``[0].logits``
    dtype: torch's name without ``torch.``
    shape: of one row
    """

    key: _Shared
    hook: _Shared
    module: _Shared
    path: _Shared
    dtype: _Shared
    shape: Annotated[tuple[_Count, ...], Field(max_length=64)]
    rows: _Count
    by: RowKind


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Shard:
    """A line of an index: a file that is complete on disk, its size and hash, and its entries.

    follows: the SHA-256 of the shard in the line before; None in the first line, and by earlier versions in all

    Its rows must fit into its bytes; unknown keys of the line are dropped.
    """

    file: Annotated[str, StringConstraints(min_length=1, max_length=255), Field(alias="shard")]
    sha256: Sha256
    bytes: _Count
    columns: Annotated[tuple[Name, ...], Field(max_length=64)]
    entries: Listing[Entry]
    version: _Count = VERSION
    follows: Sha256 | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_a_known_version(cls, record: Any) -> Any:
        version = record.get("version") if isinstance(record, dict) else None
        if isinstance(version, int) and version > VERSION:
            raise ValueError(f"it has format {version}, this hookrun reads up to {VERSION}")
        return record

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if "/" in self.file or "\0" in self.file or self.file in (".", "..", INDEX):
            raise ValueError(f"the shard {self.file!r} lies outside of its folder or cannot be a file of it")
        if missing := [name for name in ALWAYS_WRITTEN if name not in self.columns]:
            raise ValueError(f"its rows do not say their {', '.join(missing)}")
        for entry in self.entries:
            if entry.dtype not in STORED_DTYPES:
                raise ValueError(f"unknown dtype {entry.dtype!r}, written by another version of hookrun")
        table = 8 * len(self.columns)
        least = sum(entry.rows * (row_bytes(entry.dtype, entry.shape) + table) for entry in self.entries)
        if least > self.bytes:
            raise ValueError(f"its rows need {least:,} bytes, and the shard has {self.bytes:,}")
        return self


def row_bytes(dtype: str, shape: Sequence[int]) -> int:
    """The bytes of one row of a dtype in `STORED_DTYPES`."""
    bits = re.search(r"\d+", dtype)  # bool has no number and takes one byte
    size = int(bits[0]) // 8 if bits else 1
    return size * math.prod(shape)


def index_name(rank: int) -> str:
    """The name of a rank's index file."""
    if rank == 0:
        return INDEX
    return f"index_{rank}.jsonl"


def shard_name(rank: int, number: int) -> str:
    """The name of a rank's shard; all ranks write into one folder."""
    if rank == 0:
        return f"{number:06d}.safetensors"
    return f"{rank}_{number:06d}.safetensors"


def index_names(folder: Path) -> list[str]:
    """The names of the indexes in the folder in the order of the ranks; always with that of rank 0."""
    return [INDEX, *names_inside(folder, _OF_RANK)]


def read_index(folder: Path, notes: list[str] | None = None) -> list[Shard]:
    """The shards listed in the indexes of a folder.

    The folder is one of a run directory: neither it nor its files may be links. StoreError if a line does not
    describe a shard, for two lines of one shard, and for a line that does not follow the one before it.

    notes: gets a note on each last line that is cut off
    """
    shards: dict[str, Shard] = {}
    for name in index_names(folder):
        before = None
        for number, record in read_lines(folder / name, folder.parent, notes):
            place = f"{folder / name}, line {number}"
            shard = fitting(f"{place}: it does not describe a shard", record, Shard)
            if shard.file in shards:
                raise StoreError(f"{place}: the shard {shard.file!r} is in an earlier line too")
            if shard.follows not in (None, before):
                raise StoreError(
                    f"{place}: it does not follow the line before it: a line was exchanged or removed"
                )
            before = shard.sha256
            shards[shard.file] = shard
    return list(shards.values())
