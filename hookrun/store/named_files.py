"""Fingerprints of the files and folders that a configuration names, which change with their content."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hookrun.engine.keys import nested
from hookrun.store.format import STATUS

WHOLE = 2**26
"""Bytes. Of a larger file only evenly spaced blocks are read, including the first and the last."""

BLOCK = 2**20
BLOCKS = 64
MOST_READ = 1_000
"""How many evenly spaced files of a folder are read; the others count by name only."""

PATHS = frozenset({"file", "root", "run", "path", "weights", "tokenizer"})
"""Keys whose values are paths."""

_EMPTY = "no bytes"
"""Fingerprint of an empty file, and of a system file that reports 0 bytes but may never end."""

_OF_EACH = 2**16
_MOST_PATH = 4_096


def named_files(config: Mapping[str, Any], run: Path | None = None) -> dict[str, str]:
    """Each path in a configuration -> the fingerprint of the file or folder there.

    Values of keys such as `file` and `root` count as paths, and so do values that look like one. For a run directory
    its status is the fingerprint. Other folders are read only if the section `data` names them.

    run: the run directory of the configuration itself, which is left out
    """
    data = set(_paths(config.get("data")))
    contents: dict[str, str] = {}
    for text in _paths(config):
        if run is not None and Path(text).expanduser().resolve() == run.resolve():
            continue
        content = _content(text, is_data=text in data)
        if content:
            contents[text] = content
    return contents


def _paths(config: Any) -> Iterator[str]:
    """The strings that may be paths: a bare word is not one, since a folder may have the name of a model or module."""
    for place, text in nested(config):
        if not isinstance(text, str) or not 0 < len(text) <= _MOST_PATH or "\0" in text:
            continue
        names = [
            part for part in place.split(".") if not part.isdecimal()
        ]  # the key, also of what is in a list
        if (names and names[-1] in PATHS) or os.sep in text or Path(text).suffix:
            yield text


def _content(text: str, *, is_data: bool) -> str:
    """The fingerprint of a path; empty if nothing is there, or nothing that counts."""
    with suppress(OSError, ValueError):
        path = Path(text).expanduser()
        info = path.stat()
        if stat.S_ISREG(info.st_mode):
            return _file_content(path, info.st_size)
        if stat.S_ISDIR(info.st_mode):
            status = path / STATUS
            if status.is_file():
                return f"{path.resolve()} {status.read_text(encoding='utf-8')}"
            if is_data:
                return _folder_content(path)
            return str(path.resolve())
    return ""


def _file_content(path: Path, size: int) -> str:
    if size == 0:
        return _EMPTY
    with path.open("rb") as file:
        if size <= WHOLE:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        for number in range(BLOCKS):
            file.seek((size - BLOCK) * number // (BLOCKS - 1))
            digest.update(file.read(BLOCK))
        return digest.hexdigest()


def _folder_content(folder: Path) -> str:
    names: list[str] = []
    for parent, _, files in os.walk(folder):
        names += [os.path.normpath(os.path.join(os.path.relpath(parent, folder), name)) for name in files]
    names.sort()
    digest = hashlib.sha256()
    apart = max(1, -(-len(names) // MOST_READ))
    for number, name in enumerate(names):
        digest.update(name.encode("utf-8", "surrogateescape"))
        if number % apart == 0:
            with suppress(OSError):
                info = (folder / name).stat()
                if stat.S_ISREG(info.st_mode) and info.st_size:  # a pipe or a device might never end
                    with (folder / name).open("rb") as file:
                        digest.update(f"{info.st_size} ".encode() + file.read(_OF_EACH))
    return f"{len(names)} files {digest.hexdigest()}"
