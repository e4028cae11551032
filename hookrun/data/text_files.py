"""Text and JSON Lines from untrusted files, read within limits; errors name the line; sequences of their tokens."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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


MOST_TOKENS = 2**28
LONGEST = 4096
"""The largest length to which sequences are padded if no length is given."""


class ReadSequences:
    """Sequences of token ids that are appended one by one, each with the number of the line that it comes from."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._ids = array("i")
        self._starts = array("q", [0])
        self._lines = array("i")
        self.longest = 0

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def tokens(self) -> int:
        """The number of tokens of all sequences."""
        return len(self._ids)

    def append(self, ids: Sequence[int], line: int) -> None:
        """Append a sequence. Raises SpecError where there are too many tokens."""
        if len(self._ids) + len(ids) > MOST_TOKENS:
            what = f"the file has more than {MOST_TOKENS:,} tokens"
            raise SpecError([Problem(self._where, what, "give a part of it")])
        self._ids.extend(ids)
        self._starts.append(len(self._ids))
        self._lines.append(line)
        self.longest = max(self.longest, len(ids))

    def line(self, number: int) -> int:
        """The line of a sequence."""
        return self._lines[number]

    def __getitem__(self, number: int) -> Tensor:
        """The ids of a sequence, [n] int64."""
        return self.span(self._starts[number], self._starts[number + 1])

    def span(self, start: int, stop: int) -> Tensor:
        """The ids from one place to another in all sequences laid end to end, [n] int64."""
        return torch.tensor(self._ids[start:stop], dtype=torch.int64)

    def line_at(self, place: int) -> int:
        """The line of the sequence that holds a place in all of them laid end to end."""
        from bisect import bisect_right

        return self._lines[bisect_right(self._starts, place) - 1]

    def length(self, asked: int | None, key: str) -> int:
        """The length of samples: as given, or that of the longest. Raises SpecError if the longest is too long."""
        if asked is not None:
            return asked
        if self.longest > LONGEST:
            what = f"the longest has {self.longest:,} tokens, and the others would be padded to that"
            raise SpecError([Problem(key, what, f"set {key}: the most tokens of a sample")])
        return max(self.longest, 1)
