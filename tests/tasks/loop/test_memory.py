"""The memory of an analysis, estimated before it starts, and the error if it needs too much."""

from __future__ import annotations

import torch

from hookrun.tasks.loop.features import Features, Projection
from hookrun.tasks.loop.memory import SUGGESTED, reading_bytes, too_large


def test_four_blocks_of_the_widest_module_and_a_sketch_are_needed() -> None:
    narrow, wide = (Features("x", torch.empty(10, width), block_bytes=1000) for width in (5, 1000))
    assert reading_bytes([narrow]) == 4 * 25 * 5 * 8, "25 rows of 40 bytes in a block"
    assert reading_bytes([narrow, wide]) == 4 * 1 * 1000 * 8, "at least one row"
    projected = Features("x", torch.empty(10, 1000), block_bytes=1000, projection=Projection(8, seed=0))
    assert reading_bytes([projected]) == reading_bytes([wide]) + 2 * 8 * 1000


def test_a_projection_is_suggested_only_where_it_would_fit() -> None:
    features = Features("fc", torch.empty(2000, 8, 1024), block_bytes=1)
    tried = list[int]()

    def needs(result: int) -> str:
        return str(too_large("probing", features, 150_000_001, 10**6, lambda to: tried.append(to) or result))

    found = needs(10**6)
    assert "task.max_bytes" in found and "fc has 2,000 rows of [8, 1024]" in found
    assert "task.max_bytes=200000000" in found and f"task.project={SUGGESTED}" in found
    assert "task.project" not in needs(10**6 + 1) and set(tried) == {SUGGESTED}
    narrow = Features("fc", torch.empty(2000, SUGGESTED), block_bytes=1)
    assert "task.project" not in str(too_large("probing", narrow, 10**8, 1, lambda to: 0))
