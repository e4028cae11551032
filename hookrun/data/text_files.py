"""Text and JSON Lines from untrusted files, read within limits; errors name the line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hookrun.data.tokenizer import WHERE, Encoded, Tokenizer
from hookrun.errors import nearest, reason, spec_error

MOST_LINE = 2**20
"""Bytes of one line."""
MOST_LINES = 2_000_000
MOST_FILE = 2**28
"""Bytes of a file."""

Stamp = tuple[int, int, int]
"""Inode, size and time of a file, which change with its content."""


def checked_file(
    name: str | None, root: Path | None, where: str, suffixes: tuple[str, ...]
) -> tuple[Path, Stamp]:
    """The path and the stamp of a file that can be read; a relative path starts at the root or the working directory.

    Raises SpecError, at the key `where`, for a file that cannot be read.
    """
    if not name:
        raise spec_error(where, "is missing: no file is named", f"set {where}=FILE")
    path = (root or Path.cwd()) / Path(name).expanduser()
    if path.suffix not in suffixes:
        raise spec_error(where, f"{path} does not end in {' or '.join(suffixes)}", "give such a file")
    if not path.is_file():
        what = f"there is no file {path}"
        if path.parent.is_dir():
            what += f"; beside it {nearest(path.name, [each.name for each in path.parent.iterdir()])}"
        raise spec_error(
            where,
            what,
            "correct the path; a relative one starts at data.root, or where none is set at the working directory",
        )
    stat = path.stat()
    if stat.st_size > MOST_FILE:
        raise spec_error(
            where,
            f"{path} has {stat.st_size / 2**20:,.0f} MiB, and at most {MOST_FILE / 2**20:,.0f} are read",
            "split it, or give a part of it",
        )
    return path, (stat.st_ino, stat.st_size, stat.st_mtime_ns)


def lines(path: Path, where: str) -> Iterator[tuple[int, str]]:
    """Number, from 1, and text of each line, with its end. Raises SpecError for lines not in UTF-8 or too long."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MOST_LINE + 1):
            number += 1
            if len(raw) > MOST_LINE:
                raise spec_error(
                    where,
                    f"{path} line {number} has more than {MOST_LINE:,} bytes",
                    "shorten it, or break it into lines",
                )
            if number > MOST_LINES:
                raise spec_error(where, f"{path} has more than {MOST_LINES:,} lines", "give a part of it")
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise spec_error(
                    where,
                    f"{path} line {number} is not UTF-8: {error.reason} at byte {error.start}",
                    "save the file in UTF-8",
                ) from error


def records(path: Path, where: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of each line of a .jsonl file that is not blank. Raises SpecError."""
    for number, line in lines(path, where):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise spec_error(
                where,
                f"{path} line {number} is not JSON: {reason(error)}",
                "write one JSON object on each line",
            ) from error
        if not isinstance(record, dict):
            raise spec_error(
                where,
                f"{path} line {number} is a JSON {_kind(record)}, expected an object with named fields",
                "write one JSON object on each line",
            )
        yield number, record


def text_field(record: dict[str, Any], name: str, at: str, key: str) -> str:
    """The text in a field. Raises SpecError, at the key that names the field, where it is missing or something else.

    at: file and line
    """
    if name not in record:
        raise spec_error(
            key,
            f"{at} has no field '{name}'; {nearest(name, [str(each)[:80] for each in record])}",
            f"name the field in {key}",
        )
    value = record[name]
    if not isinstance(value, str):
        raise spec_error(key, f"{at}: the field '{name}' is a {_kind(value)}, expected a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON may hold one half of a surrogate pair
        raise spec_error(
            key, f"{at}: the field '{name}' holds half of a character (a lone surrogate)"
        ) from error
    return value


def _kind(value: Any) -> str:
    names = {dict: "object", list: "list", str: "text", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


MOST_TOKENS = 2**28
LONGEST = 4096
"""The largest length to which sequences are padded if no length is given."""


def encode(
    tokenizer: Tokenizer, text: str, at: str, *, special: bool = False, offsets: bool = False
) -> Encoded:
    """The tokens of a text; see `Tokenizer.encode`. Raises SpecError, which names the place `at`."""
    try:
        return tokenizer.encode(text, special=special, offsets=offsets)
    except Exception as error:  # a tokenizer of a folder may raise anything
        raise spec_error(WHERE, f"{at} cannot be tokenized: {reason(error)}") from error


def require_few_tokens(count: int, where: str) -> None:
    """Raises SpecError, at the key `where`, if this is more than a file may have."""
    if count > MOST_TOKENS:
        raise spec_error(where, f"the file has more than {MOST_TOKENS:,} tokens", "give a part of it")


def padded_length(longest: int, key: str) -> int:
    """The length of samples without a given one: that of the longest. Raises SpecError if that is too long."""
    if longest > LONGEST:
        raise spec_error(
            key,
            f"the longest has {longest:,} tokens, and the others would be padded to that",
            f"set {key}: the most tokens of a sample",
        )
    return max(longest, 1)
