"""Files of JSON lines, read in bounded memory: a long file is sampled."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hookrun.store.format import decode

MOST_BYTES = 24 * 2**20


@dataclass
class SampledLines:
    """The records of a file in its order.

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
) -> SampledLines:
    """The whole file up to `limit` bytes; of a longer one about so many, drawn line by line with a fixed seed.

    always: lines that are kept whatever the file's size
    keys:   what each record must have, and of which type; other records are left out
    """
    found = SampledLines()
    if not path.is_file():
        return found
    share = limit / max(path.stat().st_size, 1)
    draw = random.Random(0)
    broken = strange = total = 0
    with path.open("rb") as file:
        for line in file:
            total += 1
            if share < 1 and draw.random() > share and not always(line):
                continue
            try:
                record = decode(line)
            except ValueError:
                broken += bool(line.endswith(b"\n"))  # an unfinished last line is still being written
                continue
            if isinstance(record, dict) and all(isinstance(record.get(k), v) for k, v in keys.items()):
                found.records.append(record)
            else:
                strange += 1
    found.is_sample = share < 1
    if found.is_sample:
        found.notes.append(
            f"{path.name} has {total:,} lines: {len(found.records):,} of them, drawn at random, are shown"
        )
    if broken:
        found.notes.append(f"{path.name}: {broken:,} lines are no JSON and left out")
    if strange:
        found.notes.append(f"{path.name}: {strange:,} lines hold no such record and are left out")
    return found


def is_number(value: Any) -> bool:
    """Whether a value of a record is a number; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def numbers(record: Mapping[str, Any], without: Collection[str]) -> dict[str, float]:
    """The numbers of a record, those under the keys in `without` left out."""
    return {name: value for name, value in record.items() if name not in without and is_number(value)}
