"""Files of JSON lines, read in bounded memory: a long one is sampled."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from hookrun.store.files import os_reason
from hookrun.store.format import decode
from hookrun.store.inside import is_there, open_inside
from hookrun.store.records import Record
from hookrun.store.scores import is_batch, is_part

MOST_BYTES = 24 * 2**20
MOST_LINE = 2**20
"""Bytes of a line; longer lines are left out."""


_TOGETHER = 2**17
"""Bytes of lines, about, that are parsed at a time."""


@dataclass
class SampledLines:
    """The records of a file, in the file's order.

    notes:     what was left out, and why
    is_sample: whether the file has more records
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_sample: bool = False


def sampled(
    path: Path,
    model: type[Record],
    *,
    limit: int = MOST_BYTES,
    always: Callable[[Mapping[str, Any]], bool] = lambda record: False,
) -> SampledLines:
    """All records of a file of up to `limit` bytes; of a longer file a random sample of that size, with a fixed seed.

    model:  of each record; others are left out
    always: whether a record is kept even if the file is sampled
    """
    found, counts, draw = SampledLines(), Counter[str](), random.Random(0)
    share = limit / max(path.lstat().st_size if is_there(path) else 0, 1)
    found.is_sample = share < 1
    for _, record in _decoded(path, found, counts):
        is_drawn = share >= 1 or draw.random() <= share
        if is_drawn or (isinstance(record, dict) and always(record)):
            _take(found, counts, record, model)
    found.notes += _notes(path.name, counts, len(found.records) if found.is_sample else None)
    return found


def beginning(
    path: Path, model: type[Record], *, most: int | None = None, most_bytes: int | None = None
) -> SampledLines:
    """The records of the first lines of a file: at most `most` lines and `most_bytes` bytes.

    model: of each record; others are left out
    """
    found, counts, size = SampledLines(), Counter[str](), 0
    for number, (line, record) in enumerate(_decoded(path, found, counts), start=1):
        size += len(line)
        if (most is not None and number > most) or (most_bytes is not None and size > most_bytes):
            found.is_sample = True
            break
        _take(found, counts, record, model)
    if found.is_sample and most is not None:
        found.notes.append(f"{path.name}: only its first {most:,} lines are read")
    found.notes += _notes(path.name, counts, None)
    return found


def is_kept(line: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl is kept if the file is sampled: all except single batches and parts of a pass."""
    return not is_batch(line) and not is_part(line)


def _take(found: SampledLines, counts: Counter[str], record: Any, model: type[Record]) -> None:
    try:
        model.model_validate(record)
        found.records.append(record)
    except ValidationError:
        counts["strange"] += 1


def _decoded(path: Path, found: SampledLines, counts: Counter[str]) -> Iterator[tuple[bytes, Any]]:
    """Each line and its value; a line that is not JSON or too long is counted and left out."""
    lines, size = list[bytes](), 0
    try:
        with open_inside(path) as file:
            for line in _lines(file, counts):
                lines.append(line)
                size += len(line)
                if size >= _TOGETHER:
                    yield from _values(lines, counts)
                    lines, size = [], 0
            yield from _values(lines, counts)
    except FileNotFoundError:
        return
    except OSError as error:
        found.notes.append(f"{path.name} can't be read: {os_reason(error)}")


def _values(lines: list[bytes], counts: Counter[str]) -> Iterator[tuple[bytes, Any]]:
    try:  # parsing all lines in one go takes a third of the time
        records = decode(b"[" + b",".join(lines) + b"]")
    except ValueError:
        records = ()
    if len(records) == len(lines):
        yield from zip(lines, records, strict=True)
        return
    for line in lines:
        try:
            yield line, decode(line)
        except ValueError:
            counts["broken"] += line.endswith(b"\n")  # an unfinished last line is still being written


def _lines(file: BinaryIO, counts: Counter[str]) -> Iterator[bytes]:
    """The lines of a file; one that is longer than `MOST_LINE` is counted and left out."""
    is_rest = False
    while piece := file.readline(MOST_LINE):
        is_end = piece.endswith(b"\n") or len(piece) < MOST_LINE
        if is_rest or not is_end:
            counts["long"] += not is_rest
        else:
            yield piece
        counts["total"] += is_end
        is_rest = not is_end


def _notes(name: str, counts: Counter[str], drawn: int | None) -> Iterator[str]:
    """Notes on what was left out. drawn: how many lines are shown, if that is a sample."""
    if drawn is not None:
        yield f"{name} has {counts['total']:,} lines: {drawn:,} of them, drawn at random, are shown"
    if counts["broken"]:
        yield f"{name}: {counts['broken']:,} lines are not JSON and left out"
    if counts["strange"]:
        yield f"{name}: {counts['strange']:,} lines are not valid records and left out"
    if counts["long"]:
        yield f"{name}: {counts['long']:,} lines are longer than {MOST_LINE:,} bytes and left out"


def is_number(value: Any) -> bool:
    """Whether a value of a record is a number; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_place(value: Any) -> bool:
    """Whether a value is valid as the number of a layer, head, position or sample: a whole number from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def numbers(record: Mapping[str, Any], without: Collection[str]) -> dict[str, float]:
    """The numbers of a record, except those under the keys in `without`."""
    return {name: value for name, value in record.items() if name not in without and is_number(value)}
