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
from typing import TYPE_CHECKING

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
    known = {(path, size): sha256 for path, (size, sha256) in seen.items()}
    known |= {
        (f"{name}/{record['shard']}", record["bytes"]): record["sha256"]
        for name in (CAPTURES, PREDICTIONS)
        for index in index_names(folder / name)
        for _, record in read_lines(folder / name / index, folder)
    }
    there = [(path, info.st_size) for path, info in _judged_files(folder) if stat.S_ISREG(info.st_mode)]
    files = {
        path: (size, known[path, size]) if (path, size) in known else hashed(folder / path, folder)
        for path, size in there
    }
    cut_off = {path for path, size in known if path not in files or files[path][0] != size}
    if gone := sorted(cut_off | (written - files.keys())):
        raise StoreError(f"{folder} has lost files that were written to it: {listed(gone, MOST_LISTED)}")
    content = {
        "files": {path: {"bytes": size, "sha256": sha256} for path, (size, sha256) in sorted(files.items())}
    }
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
    there = dict(_judged_files(folder))
    for name in manifest.keys() - there.keys():
        yield name, f"{folder / name} is missing"
    for name, info in there.items():
        path = folder / name
        if kind := kind_of(info):
            yield name, f"{path} is {kind}"
        elif name not in manifest:
            yield name, f"{path} is not in the manifest: it was added after the run"
        else:
            try:
                require_unchanged(path, folder, *manifest[name], says="the manifest")
                if recorded.get(name, manifest[name][1]) != manifest[name][1]:
                    yield name, f"{path} has another SHA-256 in its index than in the manifest"
            except StoreError as error:
                yield name, str(error)


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
    digest = hashlib.sha256() if digest is None else digest
    with open_inside(path, root) as file:
        hashlib.file_digest(file, lambda: digest)  # type: ignore[arg-type, return-value]  # it needs `update` alone
        return file.tell(), digest.hexdigest()


def _judged_files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    return (
        (path, info)
        for path, info in listed_inside(folder)
        if path not in NOT_IN_MANIFEST and not path.startswith(STATES)
    )
