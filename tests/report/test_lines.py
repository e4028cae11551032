"""Lines of JSON of any length are read with limited memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

from hookrun.report import lines
from hookrun.store.records import MetricsLine


def test_many_long_lines_that_are_not_json_take_the_memory_of_a_few(tmp_path: Path) -> None:
    file, size = tmp_path / "metrics.jsonl", lines.MOST_LINE - 1
    with file.open("wb") as opened:
        for _ in range(24):
            opened.write(b"x" * size + b"\n")
    tracemalloc.start()
    try:
        found = lines.sampled(file, MetricsLine, always=lines.is_kept, limit=4 * lines.MOST_LINE)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * lines.MOST_LINE
    assert found.records == [] and "24 lines are not JSON and left out" in found.notes[-1]
