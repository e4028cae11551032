"""The indexes of a folder of shards: one for rank 0, and one for each other rank that wrote rows into it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hookrun.store.files import StoreError, blocks_of_lines, os_reason
from hookrun.store.format import INDEX
from hookrun.store.shard import Shard

_OF_RANK = re.compile(r"index_([1-9]\d{0,5})\.jsonl")


def index_name(rank: int) -> str:
    """The name of a rank's index file."""
    return INDEX if rank == 0 else f"index_{rank}.jsonl"


def shard_name(rank: int, number: int) -> str:
    """The name of a rank's shard; all ranks write into one folder."""
    return f"{number:06d}.safetensors" if rank == 0 else f"{rank}_{number:06d}.safetensors"


def index_names(folder: Path) -> list[str]:
    """The names of the indexes in the folder in the order of the ranks; always with that of rank 0."""
    try:
        entries = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        entries = []
    except OSError as error:
        raise StoreError(f"cannot list {folder}: {os_reason(error)}") from error
    others = {int(found[1]): name for name in entries if (found := _OF_RANK.fullmatch(name))}
    return [INDEX, *(others[rank] for rank in sorted(others))]


def read_index(folder: Path) -> tuple[list[Shard], str]:
    """The shards listed in the indexes of a folder, and a note on an incomplete last line, or ``""``.

    The folder is one of a run directory: neither it nor its files may be links. StoreError if a line does not
    describe a shard, and for two lines of one shard.
    """
    shards, note = dict[str, Shard](), ""
    lines = (
        (folder / name, block)
        for name in index_names(folder)
        for block in blocks_of_lines(folder / name, folder.parent)
    )
    for path, block in lines:
        note = block.note or note
        for number, record in enumerate(block.records, start=block.first):
            try:
                shard = Shard.of(record)
                if shard.file in shards:
                    raise ValueError(f"the shard {shard.file!r} is in an earlier line too")
            except ValueError as error:
                raise StoreError(f"{path}, line {number}: {error}") from error
            shards[shard.file] = shard
    return list(shards.values()), note
