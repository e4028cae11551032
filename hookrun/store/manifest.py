"""The manifest: size and hash of every file of a run when it ended; `verify` compares the files with it.

`manifest.json` is ``{"files": {path: {"bytes": n, "sha256": hex}}}``, paths from the run directory with ``/``. It
leaves out itself, status.json, the lock, report.html and resumable states, which hold their own checksums. The
status of a run that ended holds the manifest's SHA-256 under ``manifest``.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hookrun.errors import MOST_LISTED, listed
from hookrun.store.captures.shard import index_names
from hookrun.store.files import (
    StoreError,
    kind_of,
    listed_inside,
    open_inside,
    read_lines,
    require_bytes,
    write_json,
)
from hookrun.store.format import CAPTURES, MANIFEST, NOT_IN_MANIFEST, PREDICTIONS, STATES

if TYPE_CHECKING:
    from hashlib import _Hash

    from hookrun.store.captures.tensor_file import Crc32


def write_manifest(
    folder: Path, written: Set[str] = frozenset(), seen: Mapping[str, tuple[int, str]] = MappingProxyType({})
) -> str:
    """Write manifest.json, atomically, and return its SHA-256.

    Hashes of shards are taken from their index, where they were stored at writing. Entries that are not regular files
    (such as links) are left out. StoreError if a file cannot be read, the manifest cannot be written, a shard is
    missing or cut off, or one of the files `written` or `seen` is missing.

    seen: path -> bytes and SHA-256 of files that were read before and are not read again
    """
    hashes = dict(seen)
    for name in (CAPTURES, PREDICTIONS):
        for index in index_names(folder / name):
            for _, record in read_lines(folder / name / index, folder):
                hashes[f"{name}/{record['shard']}"] = record["bytes"], record["sha256"]
    files: dict[str, dict[str, Any]] = {}
    missing = {*written, *hashes}
    for path, info in _judged_files(folder):
        if not stat.S_ISREG(info.st_mode):
            continue
        size, sha256 = hashes.get(path, (None, ""))
        if size is None:
            size, sha256 = hashed(folder / path, folder)
        if size == info.st_size or path not in hashes:
            missing.discard(path)
        files[path] = {"bytes": size, "sha256": sha256}
    if missing:
        raise StoreError(
            f"{folder} has lost files that were written to it: {listed(sorted(missing), MOST_LISTED)}"
        )
    content = {"files": dict(sorted(files.items()))}
    write_json(folder / MANIFEST, content, flushes_folder=False)  # writing the status afterwards flushes it
    return hashed(folder / MANIFEST)[1]


def read_manifest(folder: Path, sha256: str) -> dict[str, tuple[int, str]]:
    """Path -> bytes and SHA-256 of each file. StoreError if the manifest has another SHA-256."""
    from hookrun.store.records import ManifestRecord, typed_record

    require_unchanged(folder / MANIFEST, folder, None, sha256, says="status.json")
    record = typed_record(folder / MANIFEST, ManifestRecord)
    return {name: (file.bytes, file.sha256) for name, file in record.files.items()}


def manifest_faults(
    folder: Path, manifest: Mapping[str, tuple[int, str]], recorded: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """The path of each file that does not match the manifest, and what is wrong with it.

    recorded: path -> SHA-256 of files whose hash an index holds too; both must agree
    """
    files = dict(_judged_files(folder))
    for name in manifest.keys() - files.keys():
        yield name, f"{folder / name} is missing"
    for name, info in files.items():
        path = folder / name
        kind = kind_of(info)
        if kind:
            yield name, f"{path} is {kind}"
            continue
        if name not in manifest:
            yield name, f"{path} is not in the manifest: it was added after the run"
            continue
        size, sha256 = manifest[name]
        try:
            require_unchanged(path, folder, size, sha256, says="the manifest")
        except StoreError as error:
            yield name, str(error)
            continue
        if recorded.get(name, sha256) != sha256:
            yield name, f"{path} has another SHA-256 in its index than in the manifest"


def require_unchanged(path: Path, root: Path, size: int | None, sha256: str, *, says: str) -> None:
    """StoreError if the file cannot be read, or has another size in bytes or another SHA-256.

    size: None: not known
    says: where the expected ones are from
    """
    with open_inside(path, root) as file:
        if size is not None:  # before it is read: it may have become very large
            require_bytes(file, path, size, says=says)
        actual = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # it has `readinto`
    if actual != sha256:
        message = f"its SHA-256 is {actual[:12]}…, {says} says {sha256[:12]}…"
        raise StoreError(f"{path} was changed: {message}")


def hashed(path: Path, root: Path | None = None, digest: _Hash | Crc32 | None = None) -> tuple[int, str]:
    """Size in bytes and SHA-256 (or the given digest) of a file, read in blocks. StoreError if it cannot be read."""
    if digest is None:
        digest = hashlib.sha256()
    with open_inside(path, root) as file:
        hashlib.file_digest(file, lambda: digest)  # type: ignore[arg-type, return-value]  # it needs `update` alone
        return file.tell(), digest.hexdigest()


def _judged_files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    for path, info in listed_inside(folder):
        if path not in NOT_IN_MANIFEST and not path.startswith(STATES):
            yield path, info
