"""Files of JSON lines, read in bounded memory: a long one is sampled."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from pydantic import ValidationError

from hookrun.store.files import os_reason
from hookrun.store.format import decode
from hookrun.store.inside import open_inside
from hookrun.store.records import MetricsLine, Record

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
    always: Callable[[bytes], bool] = lambda line: False,
    limit: int = MOST_BYTES,
    keys: Mapping[str, type] = MappingProxyType({}),
    line_of: type[Record] = MetricsLine,
) -> SampledLines:
    """All records of a file of up to `limit` bytes; of a longer file a random sample of that size, with a fixed seed.

    always:  whether a line is kept even if the file is sampled
    keys:    keys that each record must have, with their types; other records are left out
    line_of: the model that validates each record
    """
    found = SampledLines()
    counts = Counter[str]()
    try:
        with open_inside(path) as file:
            share = limit / max(os.fstat(file.fileno()).st_size, 1)
            draw = random.Random(0)
            together, size = list[bytes](), 0
            for line in _lines(file, counts):
                if share < 1 and draw.random() > share and not always(line):
                    continue
                together.append(line)
                size += len(line)
                if size >= _TOGETHER:
                    _take_all(found, counts, together, keys, line_of)
                    together, size = [], 0
            _take_all(found, counts, together, keys, line_of)
    except FileNotFoundError:
        return found
    except OSError as error:
        found.notes.append(f"{path.name} can't be read: {os_reason(error)}")
        return found
    found.is_sample = share < 1
    found.notes += _notes(path.name, counts, len(found.records) if found.is_sample else None)
    return found


def beginning(
    path: Path, line_of: type[Record], *, most: int | None = None, most_bytes: int | None = None
) -> SampledLines:
    """The records of the first lines of a file: at most `most` lines and `most_bytes` bytes.

    line_of: the model that validates each record
    """
    found, counts, size = SampledLines(), Counter[str](), 0
    try:
        with open_inside(path) as file:
            for line in _lines(file, counts):
                size += len(line)
                if (most is not None and counts["total"] > most) or (
                    most_bytes is not None and size > most_bytes
                ):
                    found.is_sample = True
                    break
                _take(found, counts, line, {}, line_of)
    except FileNotFoundError:
        return found
    except OSError as error:
        found.notes.append(f"{path.name} can't be read: {os_reason(error)}")
        return found
    if found.is_sample and most is not None:
        found.notes.append(f"{path.name}: only its first {most:,} lines are read")
    found.notes += _notes(path.name, counts, None)
    return found


def is_kept(line: bytes) -> bool:
    """Whether a line of metrics.jsonl is kept if the file is sampled: all except single batches and single samples."""
    if b'"of": "sample"' in line or b'"of": "position"' in line:
        return False
    return b'"split": "train"' not in line or b'"of": "epoch"' in line


def _take_all(
    found: SampledLines,
    counts: Counter[str],
    lines: list[bytes],
    keys: Mapping[str, type],
    line_of: type[Record],
) -> None:
    """Append the records of lines, parsed in one go, which takes a third of the time."""
    try:
        records = decode(b"[" + b",".join(lines) + b"]")
    except ValueError:
        records = ()
    if len(records) != len(lines):  # the code below finds which line is broken
        for line in lines:
            _take(found, counts, line, keys, line_of)
        return
    for record in records:
        if _is_record(record, keys, line_of):
            found.records.append(record)
        else:
            counts["strange"] += 1


def _take(
    found: SampledLines,
    counts: Counter[str],
    line: bytes,
    keys: Mapping[str, type],
    line_of: type[Record],
) -> None:
    """Append the record of a line, or count why it is left out."""
    try:
        record = decode(line)
    except ValueError:
        counts["broken"] += line.endswith(b"\n")  # an unfinished last line is still being written
        return
    if _is_record(record, keys, line_of):
        found.records.append(record)
    else:
        counts["strange"] += 1


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


def _is_record(record: Any, keys: Mapping[str, type], line_of: type[Record]) -> bool:
    try:
        line_of.model_validate(record)
    except ValidationError:
        return False
    return all(isinstance(record.get(key), kind) for key, kind in keys.items())


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
