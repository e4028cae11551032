"""Whether a run directory holds what its indexes say: every shard is there, whole, and unchanged."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from hookrun.store.captures import read_index
from hookrun.store.files import StoreError, read_json, read_lines
from hookrun.store.format import (
    CAPTURES,
    CHECKPOINTS,
    ENV,
    HOOKS,
    INDEX,
    METRICS,
    MODEL,
    PLAN,
    PREDICTIONS,
    STATS,
    STATUS,
    Shard,
)
from hookrun.store.reader import open_run

BLOCK = 1 << 20


@dataclass(frozen=True)
class Verified:
    """What was found.

    shards, bytes: how many are indexed, and their bytes
    bad:           one line for each file that is not what it should be
    notes:         what is odd and harms nothing: what a run that was cut off left behind
    """

    shards: int
    bytes: int
    bad: list[str]
    notes: list[str]


def verify(path: Path) -> Verified:
    """Read every byte that a run captured, and whatever else of it can be judged. StoreError if there is no run.

    Of a run that says it is done, nothing may be missing or half written.
    """
    path = open_run(path).path
    bad, notes = list[str](), list[str]()
    shards = list[tuple[Path, Shard]]()
    contents = dict[str, Any]()
    for name in (STATUS, PLAN, ENV, MODEL, HOOKS):
        with _collecting(bad):
            if (path / name).exists():
                contents[name] = read_json(path / name)
    for name in (METRICS, STATS):
        with _collecting(bad):
            _, note = read_lines(path / name)
            notes += [note] if note else []
    for folder in (path / CAPTURES, path / PREDICTIONS):
        with _collecting(bad):
            shards += [(folder, shard) for shard in _indexed(folder, notes)]
    for folder, shard in shards:
        bad += _faults(folder / shard.file, shard)
    for checkpoint in sorted((path / CHECKPOINTS).glob("*.safetensors")):
        bad += _unreadable(checkpoint)
    status = contents.get(STATUS)
    if isinstance(status, dict) and status.get("status") == "done":  # then there was nothing to cut off
        bad, notes = bad + notes, []
    return Verified(len(shards), sum(shard.bytes for _, shard in shards), bad, notes)


def _indexed(folder: Path, notes: list[str]) -> list[Shard]:
    shards, note = read_index(folder)
    notes += [note] if note else []
    known = {INDEX, *(shard.file for shard in shards)}
    left = (
        sorted(entry.name for entry in folder.iterdir() if entry.name not in known) if folder.is_dir() else []
    )
    notes += [f"{folder / name} is in no index" for name in left]
    return shards


@contextmanager
def _collecting(bad: list[str]) -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        bad.append(str(error))


def _faults(path: Path, shard: Shard) -> Iterator[str]:
    if not path.is_file():
        yield f"{path} is missing"
        return
    size = path.stat().st_size
    if size != shard.bytes:
        yield f"{path} has {size} bytes, its index says {shard.bytes}"
        return
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    if digest.hexdigest() != shard.sha256:
        yield f"{path} was changed: its SHA-256 is {digest.hexdigest()[:12]}…, its index says {shard.sha256[:12]}…"
        return
    yield from _unreadable(
        path, [name for entry in shard.entries for name in (entry.key, f"{entry.key}.rows")]
    )


def _unreadable(path: Path, names: list[str] | None = None) -> Iterator[str]:
    try:
        with safe_open(path, framework="pt") as file:
            missing = set(names or ()) - set(file.keys())
    except (SafetensorError, OSError) as error:
        yield f"{path} is no readable safetensors file: {error}"
        return
    if missing:
        yield f"{path} lacks the tensors {', '.join(sorted(missing))}"
