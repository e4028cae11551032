"""Cutting the files of an interrupted run back to the position of a resumable state.

Everything is checked before anything is changed, and cutting may be repeated: if a process is killed in the middle, the
next one cuts the directory back to the same position.
"""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import Path
from typing import Annotated

from pydantic import Field

from hookrun.store.captures.shard import Shard, index_name, index_names
from hookrun.store.files import (
    StoreError,
    decoded_lines,
    names_inside,
    open_inside,
    os_reason,
    require_size,
    sync_folder,
)
from hookrun.store.format import (
    CAPTURES,
    CHECKPOINTS,
    ERROR,
    HOOKS,
    MANIFEST,
    PREDICTIONS,
)
from hookrun.store.records import Count, Name, Record, fitting
from hookrun.store.studies import streams

AT_THE_END = (MANIFEST, HOOKS, ERROR)
"""Files written at the end of a run, which a resumed run does not have yet."""

_SHARD = re.compile(r"([1-9]\d{0,5}_)?\d{6,}\.safetensors")
_ASIDE = re.compile(r"\..+\.\d+\.tmp")
"""The name of a file that `replacing` did not finish."""


class IndexPosition(Record):
    """How far the shards of one rank in a folder reach.

    index:  the bytes of its index
    shards: the number of lines in it, and the number of the next shard
    counts: hook -> module -> (tensors, bytes, rows)
    turns:  whether its rows have a column `turn`, which orders the rows of several ranks
    """

    index: Count = 0
    shards: Count = 0
    counts: dict[Name, dict[Name, Annotated[tuple[Count, Count, Count], Field(strict=False)]]] = {}
    turns: bool = False


class FolderPosition(IndexPosition):
    """How far a folder of shards reaches: for rank 0, and in `others` for the other ranks in their order."""

    others: list[IndexPosition] = []

    @property
    def parts(self) -> list[IndexPosition]:
        """The position of each rank."""
        return [self, *self.others]

    def of_rank(self, rank: int) -> IndexPosition:
        """The position of one rank; empty if it has not written anything."""
        return self.parts[rank] if rank < len(self.parts) else IndexPosition()


class PositionRecord(Record):
    """How far the files of a run directory reach: the bytes of each file of lines, and the two folders of shards.

    batches: the number of batches computed
    """

    __pydantic_extra__: dict[Name, Count]

    batches: Count = 0
    captures: FolderPosition = FolderPosition.model_construct()
    predictions: FolderPosition = FolderPosition.model_construct()

    @property
    def lines(self) -> dict[str, int]:
        """File of lines -> its bytes."""
        sizes = self.model_extra or {}
        return {name: sizes.get(name.removesuffix(".jsonl"), 0) for name in streams()}


def cut_back(folder: Path, position: PositionRecord) -> None:
    """Cut every file of lines and every index, and remove every shard that the indexes then do not name.

    Unfinished files and the files of a run's end are removed; other files stay as they are. StoreError, before anything
    is changed, if the directory does not hold what the position names.
    """
    for name in (CAPTURES, PREDICTIONS, CHECKPOINTS):
        path = folder / name
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise StoreError(f"cannot go on in {folder}: {name} is not a folder of its own")
    sizes, kept = {folder / name: size for name, size in position.lines.items()}, set[Path]()
    for name, reached in ((CAPTURES, position.captures), (PREDICTIONS, position.predictions)):
        for rank, part in enumerate(reached.parts):
            index = folder / name / index_name(rank)
            sizes[index] = part.index
            kept |= {index, *_named_shards(folder, index, part)}
    for path, size in sizes.items():
        _require_line_end(folder, path, size)
    try:
        for name in AT_THE_END:
            (folder / name).unlink(missing_ok=True)
        for path, size in sizes.items():  # before the shards, so that no index names a removed one
            _cut(path, size)
        for name in (CAPTURES, PREDICTIONS):
            # also the index of a rank that the position does not name, and only then its shards
            for file in (*index_names(folder / name), *names_inside(folder / name, _SHARD)):
                if folder / name / file not in kept:
                    (folder / name / file).unlink(missing_ok=True)
        for name in ("", CAPTURES, PREDICTIONS, CHECKPOINTS):
            for file in names_inside(folder / name, _ASIDE):
                (folder / name / file).unlink()
    except OSError as error:
        raise StoreError(f"cannot cut back {error.filename or folder}: {os_reason(error)}") from error
    sync_folder(folder)


def _require_line_end(root: Path, path: Path, size: int) -> None:
    """StoreError unless the file has at least this many bytes and a line ends there."""
    if not size:
        return
    with open_inside(path, root) as file:
        there = os.fstat(file.fileno()).st_size
        file.seek(size - 1)
        last = file.read(1)
    if last != b"\n":
        message = f"{path.name} has {there:,} bytes, and no line ends at byte {size:,}, as the state says"
        raise StoreError(f"cannot go on in {root}: {message}")


def _named_shards(root: Path, index: Path, reached: IndexPosition) -> set[Path]:
    """The shards that an index names up to the position; StoreError if one is missing or not of its full size."""
    size, paths = 0, set[Path]()
    for number, (line, record) in enumerate(islice(decoded_lines(index, root), reached.shards), start=1):
        shard = fitting(f"{index}, line {number}: it does not describe a shard", record, Shard)
        path = index.with_name(shard.file)
        require_size(path, root, shard.bytes, says="its index")
        paths.add(path)
        size += len(line)
    if (len(paths), size) != (reached.shards, reached.index):
        lines = f"{len(paths)} shards in {size:,} bytes, the state says {reached.shards} in {reached.index:,}"
        raise StoreError(f"cannot go on in {root}: the index of {index.parent.name} names {lines}")
    return paths


def _cut(path: Path, size: int) -> None:
    """Cut the file to this many bytes; remove it if no line is left."""
    if not size:
        path.unlink(missing_ok=True)
        return
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_NOFOLLOW), "wb") as file:
        os.ftruncate(file.fileno(), size)
        os.fsync(file.fileno())
