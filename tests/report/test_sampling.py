"""Rows of captures of any size are read with limited memory."""

from __future__ import annotations

from pathlib import Path

import torch

from hookrun.report.sampling import MOST_ROWS, draw, streams
from hookrun.store.writer import CaptureWriter


def test_a_large_capture_is_drawn_from_rows_spread_over_all_shards(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path, shard_bytes=4_000)
    for step in range(100):
        rows = torch.full((20, 4), float(step))
        writer.add("h", "m", rows, sample_ids=range(20 * step, 20 * step + 20), epoch=0, step=step, call=0)
    writer.close()
    [stream] = streams(tmp_path)
    assert writer.shards > 20
    sample = draw(tmp_path, stream)
    assert 200 < len(sample.values) <= MOST_ROWS
    assert (sample.values[0, 0], sample.values[-1, 0]) == (0, 99)
    assert torch.equal(sample.values[:, 0].long(), sample.steps)
    assert sample.samples.tolist() == sorted(sample.samples.tolist())
