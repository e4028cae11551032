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
    own = None if run is None else run.resolve()
    texts = [text for text in _paths(config) if own is None or Path(text).expanduser().resolve() != own]
    contents = {text: _content(text, is_data=text in data) for text in texts}
    return {text: content for text, content in contents.items() if content}


def _paths(config: Any) -> Iterator[str]:
    """The strings that may be paths: a bare word is not one, since a folder may have the name of a model or module."""
    for place, text in nested(config):
        # the key, also of what is in a list
        key = next((part for part in reversed(place.split(".")) if not part.isdecimal()), "")
        is_path = isinstance(text, str) and (key in PATHS or os.sep in text or bool(Path(text).suffix))
        if is_path and 0 < len(text) <= _MOST_PATH and "\0" not in text:
            yield text


def _content(text: str, *, is_data: bool) -> str:
    """The fingerprint of a path; empty if nothing is there, or nothing that counts."""
    with suppress(OSError, ValueError):
        path = Path(text).expanduser()
        info = path.stat()
        if stat.S_ISREG(info.st_mode):
            return _of_file(path, info.st_size) if info.st_size else _EMPTY
        if stat.S_ISDIR(info.st_mode):
            if (status := path / STATUS).is_file():
                return f"{path.resolve()} {status.read_text(encoding='utf-8')}"
            return _of_folder(path) if is_data else str(path.resolve())
    return ""


def _of_file(path: Path, size: int) -> str:
    with path.open("rb") as file:
        if size <= WHOLE:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        for number in range(BLOCKS):
            file.seek((size - BLOCK) * number // (BLOCKS - 1))
            digest.update(file.read(BLOCK))
        return digest.hexdigest()


def _of_folder(folder: Path) -> str:
    names = sorted(
        os.path.normpath(os.path.join(os.path.relpath(here, folder), name))
        for here, _, files in os.walk(folder)
        for name in files
    )
    digest = hashlib.sha256()
    apart = max(1, -(-len(names) // MOST_READ))
    for number, name in enumerate(names):
        digest.update(name.encode("utf-8", "surrogateescape"))
        if number % apart == 0:
            with suppress(OSError):
                there = (folder / name).stat()
                if stat.S_ISREG(there.st_mode) and there.st_size:  # a pipe or a device might never end
                    with (folder / name).open("rb") as file:
                        digest.update(f"{there.st_size} ".encode() + file.read(_OF_EACH))
    return f"{len(names)} files {digest.hexdigest()}"
