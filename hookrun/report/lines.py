"""Files of JSON lines, read in bounded memory: a long one is sampled."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hookrun.store.format import decode

MOST_BYTES = 24 * 2**20


@dataclass
class Records:
    """Records in the order of the file, and what to know of them."""

    records: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def sampled(
    path: Path, always: Callable[[bytes], bool] = lambda line: False, limit: int = MOST_BYTES
) -> Records:
    """About `limit` bytes of a file, drawn line by line with a fixed seed; all of a file that is no longer.

    always: lines that are kept whatever the file's size
    """
    found = Records()
    if not path.is_file():
        return found
    share = limit / max(path.stat().st_size, 1)
    draw = random.Random(0)
    broken = total = 0
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
            if isinstance(record, dict):
                found.records.append(record)
    if share < 1:
        found.notes.append(
            f"{path.name} has {total:,} lines: {len(found.records):,} of them, drawn at random, are shown"
        )
    if broken:
        found.notes.append(f"{path.name}: {broken:,} lines are no JSON and left out")
    return found
