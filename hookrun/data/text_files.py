"""Reads text and JSON Lines from untrusted files, line by line and within limits; errors name the line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hookrun.errors import Problem, SpecError, nearest, reason

MOST_LINE = 2**20
"""Bytes of one line."""
MOST_LINES = 2_000_000
MOST_FILE = 2**28
"""Bytes of a file."""

Stamp = tuple[int, int, int]
"""Inode, size and time of a file, which change with its content."""


def asked_file(name: str | None, root: Path | None, where: str) -> Path:
    """The path that was given; a relative one starts at the root, or at the working directory. Raises SpecError."""
    if not name:
        raise SpecError([Problem(where, "is missing: no file is named", f"set {where}=FILE")])
    return (root or Path.cwd()) / Path(name).expanduser()


def checked_file(path: Path, where: str, suffixes: tuple[str, ...]) -> Stamp:
    """The stamp of a file that can be read. Raises SpecError, at the key `where`, for one that cannot."""
    if path.suffix not in suffixes:
        what = f"{path} does not end in {' or '.join(suffixes)}"
        raise SpecError([Problem(where, what, "give such a file")])
    if not path.is_file():
        what = f"there is no file {path}"
        if path.parent.is_dir():
            what += f"; beside it {nearest(path.name, [each.name for each in path.parent.iterdir()])}"
        hint = "correct the path; a relative one starts at data.root, or where none is set at the working directory"
        raise SpecError([Problem(where, what, hint)])
    found = path.stat()
    if found.st_size > MOST_FILE:
        what = f"{path} has {found.st_size / 2**20:,.0f} MiB, and at most {MOST_FILE / 2**20:,.0f} are read"
        raise SpecError([Problem(where, what, "split it, or give a part of it")])
    return found.st_ino, found.st_size, found.st_mtime_ns


def lines(path: Path, where: str) -> Iterator[tuple[int, str]]:
    """Number, from 1, and text of each line, with its end. Raises SpecError for lines not in UTF-8 or too long."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MOST_LINE + 1):
            number += 1
            if len(raw) > MOST_LINE:
                what = f"{path} line {number} has more than {MOST_LINE:,} bytes"
                raise SpecError([Problem(where, what, "shorten it, or break it into lines")])
            if number > MOST_LINES:
                what = f"{path} has more than {MOST_LINES:,} lines"
                raise SpecError([Problem(where, what, "give a part of it")])
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                what = f"{path} line {number} is not UTF-8: {error.reason} at byte {error.start}"
                raise SpecError([Problem(where, what, "save the file in UTF-8")]) from error


def records(path: Path, where: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of each line of a .jsonl file that is not blank. Raises SpecError."""
    for number, line in lines(path, where):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            what = f"{path} line {number} is not JSON: {reason(error)}"
            raise SpecError([Problem(where, what, "write one JSON object on each line")]) from error
        if not isinstance(found, dict):
            what = f"{path} line {number} is a JSON {_kind(found)}, expected an object with named fields"
            raise SpecError([Problem(where, what, "write one JSON object on each line")])
        yield number, found


def text_field(record: dict[str, Any], name: str, at: str, key: str) -> str:
    """The text in a field. Raises SpecError, at the key that names the field, where it is missing or something else.

    at: file and line
    """
    if name not in record:
        what = f"{at} has no field '{name}'; {nearest(name, [str(each)[:80] for each in record])}"
        raise SpecError([Problem(key, what, f"name the field in {key}")])
    value = record[name]
    if not isinstance(value, str):
        raise SpecError([Problem(key, f"{at}: the field '{name}' is a {_kind(value)}, expected a text")])
    if not encodable(value):
        raise SpecError(
            [Problem(key, f"{at}: the field '{name}' holds half of a character (a lone surrogate)")]
        )
    return value


def encodable(text: str) -> bool:
    """Whether it can be encoded as UTF-8; JSON may contain lone surrogates, which cannot."""
    return not any("\ud800" <= each <= "\udfff" for each in text) if not text.isascii() else True


def _kind(value: Any) -> str:
    names = {dict: "object", list: "list", str: "text", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
