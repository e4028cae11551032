"""Cutting the files of an interrupted run back to the position of a resumable state.

Everything is checked before anything is changed, and cutting may be repeated: if a process is killed in the middle, the
next one cuts the directory back to the same position.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import Field

from hookrun.ranks.alone import Ranks
from hookrun.store.captures.shard import Shard, index_name, index_names
from hookrun.store.files import StoreError, os_reason, read_json, sync_folder
from hookrun.store.format import (
    CAPTURES,
    CHECKPOINTS,
    ERROR,
    HOOKS,
    MANIFEST,
    PREDICTIONS,
    STATUS,
    decode,
)
from hookrun.store.inside import is_there, open_inside
from hookrun.store.records import STREAMS, Count, Name, Record, Status, checked

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
    def in_turns(self) -> bool:
        """Whether several ranks have written into it."""
        return self.turns or any(each.turns for each in self.others)

    def of_rank(self, rank: int) -> IndexPosition:
        """The position of one rank; empty if it has not written anything."""
        parts = [self, *self.others]
        return parts[rank] if rank < len(parts) else IndexPosition(turns=True)


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
        return {name: sizes.get(position_key(name), 0) for name in STREAMS}


def position_key(stream: str) -> str:
    """The key of a file of `STREAMS` in a position: ``metrics`` for metrics.jsonl."""
    return stream.removesuffix(".jsonl")


def read_position(folder: Path, position: Mapping[str, Any] | None) -> PositionRecord:
    """The position of a state of the run in `folder`, checked; None is the beginning. StoreError if it is invalid."""
    if position is None:
        return PositionRecord.model_validate({})
    try:
        return checked(position, PositionRecord)
    except ValueError as error:
        raise StoreError(f"{folder}: not a position of a run directory: {error}") from error


def started_before(folder: Path) -> str:
    """When the run was first started; ``""`` if its status does not say."""
    try:
        return checked(read_json(folder / STATUS), Status).started or ""
    except (StoreError, ValueError):  # cut off, or never written: the run starts now
        return ""


def cut_back(folder: Path, position: PositionRecord) -> None:
    """Cut every file of lines and every index, and remove every shard that the indexes then do not name.

    Unfinished files and the files of a run's end are removed; other files stay as they are. StoreError, before anything
    is changed, if the directory does not hold what the position names.
    """
    lines = position.lines
    shards = {CAPTURES: position.captures, PREDICTIONS: position.predictions}
    indexes = {
        f"{name}/{index_name(rank)}": reached.of_rank(rank).index
        for name, reached in shards.items()
        for rank in range(1 + len(reached.others))
    }
    for name in (*shards, CHECKPOINTS):
        _require_folder(folder / name)
    for name, size in (*lines.items(), *indexes.items()):
        _require_lines(folder, name, size)
    kept = {name: _named_shards(folder, name, reached) for name, reached in shards.items()}
    try:
        for name in AT_THE_END:
            (folder / name).unlink(missing_ok=True)
        for name, size in indexes.items():  # before the shards, so that no index names a removed one
            _cut(folder / name, size)
        for name in shards:
            for index in index_names(folder / name)[1:]:
                if f"{name}/{index}" not in indexes:  # of a rank that the position does not name
                    (folder / name / index).unlink(missing_ok=True)
            for path in _left_over(folder / name, kept[name]):
                path.unlink()
        for name, size in lines.items():
            _cut(folder / name, size)
        for name in ("", CHECKPOINTS):
            for path in _matching(folder / name, _ASIDE):
                path.unlink()
    except OSError as error:
        raise StoreError(f"cannot cut back {error.filename or folder}: {os_reason(error)}") from error
    sync_folder(folder)


class Positioned(Protocol):
    """The writer of a folder of shards."""

    def position(self) -> dict[str, Any]:
        """The folder's IndexPosition, with what was buffered."""


def shard_positions(
    ranks: Ranks, writers: Mapping[str, Positioned], reached: PositionRecord | None
) -> dict[str, Any]:
    """Name of a folder -> its FolderPosition for all ranks; every rank must call it, and flushes its writers.

    writers: of the folders written into since the run began or was resumed
    reached: how far the folders reached when the run was resumed; None if it was not
    """
    names = (CAPTURES, PREDICTIONS)
    found = ranks.gathered({name: _own_position(name, ranks.rank, writers, reached) for name in names})
    return {
        name: {
            **found[0][name],
            "others": [*(each[name] for each in found[1:]), *_of_absent(name, ranks, reached)],
        }
        for name in names
    }


def _own_position(
    name: str, rank: int, writers: Mapping[str, Positioned], reached: PositionRecord | None
) -> dict[str, Any]:
    if name in writers:
        return writers[name].position()
    before: FolderPosition | None = getattr(reached, name, None)
    if before is None:
        return {"index": 0, "shards": 0, "counts": {}, "turns": False}
    return before.of_rank(rank).model_dump(exclude={"others"})


def _of_absent(name: str, ranks: Ranks, reached: PositionRecord | None) -> list[dict[str, Any]]:
    """Positions of ranks that took part before the run was resumed and do not now."""
    before: FolderPosition | None = getattr(reached, name, None)
    return [] if before is None else [each.model_dump() for each in before.others[ranks.size - 1 :]]


def _require_folder(path: Path) -> None:
    if is_there(path) and (path.is_symlink() or not path.is_dir()):
        raise StoreError(f"cannot go on in {path.parent}: {path.name} is not a folder of its own")


def _require_lines(root: Path, name: str, size: int) -> None:
    """StoreError unless the file has at least this many bytes and a line ends there."""
    path = root / name
    if not size and not is_there(path):
        return
    try:
        with open_inside(path, root) as file:
            there = os.fstat(file.fileno()).st_size
            last = b"\n"
            if 0 < size <= there:
                file.seek(size - 1)
                last = file.read(1)
    except OSError as error:
        raise StoreError(f"cannot go on in {root}: {name}: {os_reason(error)}") from error
    if there < size:
        raise StoreError(f"cannot go on in {root}: {name} has {there:,} bytes, the state says {size:,}")
    if last != b"\n":
        raise StoreError(
            f"cannot go on in {root}: {name}: no line ends at byte {size:,}, where the state says so"
        )


def _named_shards(root: Path, name: str, reached: FolderPosition) -> set[str]:
    """The shards that the indexes name up to the position; StoreError if one is missing or not of its full size."""
    ranks = range(1 + len(reached.others))
    return {file for rank in ranks for file in _named_by(root, name, index_name(rank), reached.of_rank(rank))}


def _named_by(root: Path, name: str, index_file: str, reached: IndexPosition) -> set[str]:
    index = root / name / index_file
    if not reached.index:
        if reached.shards:
            raise StoreError(f"cannot go on in {root}: the state names shards in {name} but no index of them")
        return set()
    with open_inside(index, root) as file:
        lines = file.read(reached.index).splitlines()
    if len(lines) != reached.shards:
        what = f"its index has {len(lines)} lines, the state says {reached.shards}"
        raise StoreError(f"cannot go on in {root}: {name}: {what}")
    found = set[str]()
    for number, line in enumerate(lines, start=1):
        try:
            shard = Shard.of(decode(line))
        except ValueError as error:
            raise StoreError(f"{index}, line {number}: {error}") from error
        path = root / name / shard.file
        try:
            with open_inside(path, root) as file:
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise StoreError(f"cannot go on in {root}: {name}/{shard.file}: {os_reason(error)}") from error
        if size != shard.bytes:
            what = f"{name}/{shard.file} has {size:,} bytes, its index says {shard.bytes:,}"
            raise StoreError(f"cannot go on in {root}: {what}")
        found.add(shard.file)
    return found


def _cut(path: Path, size: int) -> None:
    """Cut the file to this many bytes; remove it if no line is left."""
    if not size:
        path.unlink(missing_ok=True)
        return
    file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        if os.fstat(file).st_size > size:
            os.ftruncate(file, size)
        os.fsync(file)
    finally:
        os.close(file)


def _left_over(folder: Path, kept: set[str]) -> Iterator[Path]:
    """Shards that no index names, and unfinished files."""
    yield from (path for path in _matching(folder, _SHARD) if path.name not in kept)
    yield from _matching(folder, _ASIDE)


def _matching(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """The files and links of a folder whose names match; none if the folder does not exist."""
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return []
    return [
        folder / entry.name
        for entry in sorted(entries, key=lambda entry: entry.name)
        if pattern.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False)
    ]
