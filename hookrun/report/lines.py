"""Files of JSON lines, read in bounded memory: a long one is sampled."""

from __future__ import annotations

import operator
import os
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from hookrun.store.files import MissingFile, StoreError, decoded_lines, open_inside
from hookrun.store.format import decode
from hookrun.store.records import Count, Listing, Record, checked
from hookrun.store.scores import is_batch, is_part

MOST_BYTES = 24 * 2**20
MOST_LINE = 2**20
"""Bytes of a line; longer lines are left out."""

_LEFT_OUT = {
    "broken": "not JSON",
    "strange": "not valid records",
    "long": f"longer than {MOST_LINE:,} bytes",
}


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
    from_start: bool = False,
) -> SampledLines:
    """All records of a file of up to `limit` bytes; of a longer file a random sample of that size, with a fixed seed.

    model:      of each record; others are left out
    always:     whether a record is kept even if the file is sampled
    from_start: of a longer file its beginning instead of a sample
    """
    lines, counts, draw, size = SampledLines(), Counter[str](), random.Random(0), 0
    share = limit / max(path.lstat().st_size if os.path.lexists(path) else 0, 1)
    lines.is_sample = share < 1
    try:
        for line, record in decoded_lines(path, most=MOST_LINE):
            counts["total"] += 1
            counts["long"] += not line
            if isinstance(record, ValueError):
                counts["broken"] += line.endswith(b"\n")  # an unfinished last line is still being written
                continue
            size += len(line)
            if from_start and size > limit:
                break
            is_drawn = share >= 1 or from_start or draw.random() <= share
            if is_drawn or (isinstance(record, dict) and always(record)):
                try:
                    model.model_validate(record)
                    lines.records.append(record)
                except ValidationError:
                    counts["strange"] += 1
    except MissingFile:
        pass
    except StoreError as error:
        lines.notes.append(str(error))
    if lines.is_sample:
        drawn = f" has {counts['total']:,} lines: {len(lines.records):,} of them, drawn at random, are shown"
        lines.notes.append(
            path.name + (f": only its first {limit:,} bytes are read" if from_start else drawn)
        )
    lines.notes += [
        f"{path.name}: {counts[kind]:,} lines are {why} and left out"
        for kind, why in _LEFT_OUT.items()
        if counts[kind]
    ]
    return lines


def last_records(path: Path, model: type[Record], limit: int) -> list[dict[str, Any]]:
    """The valid records at the end of a file, in at most so many bytes; none if it can't be read."""
    records: list[dict[str, Any]] = []
    with suppress(StoreError), open_inside(path) as file:
        file.seek(max(os.fstat(file.fileno()).st_size - limit, 0))
        for line in file.read(limit).split(b"\n"):
            with suppress(ValueError):  # the first one is cut, or it is not valid
                record = decode(line)
                model.model_validate(record)
                records.append(record)
    return records


def is_kept(line: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl is kept if the file is sampled: all except single batches and parts of a pass."""
    return not is_batch(line) and not is_part(line)


def is_number(value: Any) -> bool:
    """Whether a value of a record is a number; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_place(value: Any) -> bool:
    """Whether a value is valid as the number of a layer, head, position or sample: a whole number from 0."""
    return is_number(value) and isinstance(value, int) and value >= 0


class Histogram(Record):
    """Counts [n] between rising edges [n + 1]."""

    counts: Listing[Count]
    edges: Listing[Annotated[float, Field(ge=-1e280, le=1e280)]]

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if len(self.edges) != len(self.counts) + 1 or any(map(operator.ge, self.edges, self.edges[1:])):
            raise ValueError("counts are between rising edges")
        return self


def is_listing(value: Any) -> bool:
    """Whether a value of a record is a list of numbers, a histogram, or a list of either, one for each index."""
    if isinstance(value, list):
        return all(map(is_number, value)) or all(map(is_listing, value))
    try:
        checked(value, Histogram)
    except ValueError:
        return False
    return True


def numbers(record: Mapping[str, Any], without: Collection[str]) -> dict[str, float]:
    """The numbers of a record, except those under the keys in `without`."""
    return {name: value for name, value in record.items() if name not in without and is_number(value)}
