"""Rows of captures of any size are read with limited memory."""

from __future__ import annotations

from pathlib import Path

import torch

from hookrun.report.sampling import MOST_ROWS, draw, rows_of_samples, stored_captures
from hookrun.store.captures.read import StoredCapture
from hookrun.store.captures.write import CaptureWriter


def test_a_large_capture_is_drawn_from_rows_spread_over_all_shards(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path, shard_bytes=4_000)
    for step in range(100):
        rows = torch.full((20, 4), float(step))
        writer.add("h", "m", rows, sample_ids=range(20 * step, 20 * step + 20), epoch=0, step=step, call=0)
    writer.close()
    [capture] = stored_captures(tmp_path)
    assert writer.shards > 20
    sample = draw(capture)
    assert 200 < len(sample.values) <= MOST_ROWS
    assert (sample.values[0, 0], sample.values[-1, 0]) == (0, 99)
    assert torch.equal(sample.values[:, 0].long(), sample.steps)
    assert sample.samples.tolist() == sorted(sample.samples.tolist())


def captured(folder: Path, by_sample: bool = True) -> StoredCapture:
    """Samples 0 to 3 in two epochs, two in each step; each row holds epoch, step and its sample."""
    writer = CaptureWriter(folder)
    for step in range(4):
        ids = [2 * (step % 2) + 1, 2 * (step % 2)]
        rows = torch.tensor([[step // 2, step, sample] for sample in ids], dtype=torch.float32)
        writer.add(
            "h",
            "m",
            rows,
            sample_ids=ids if by_sample else None,
            epoch=step // 2,
            step=step,
            call=0,
            split="val",
        )
        writer.flush()  # a shard for each step
    writer.close()
    (capture,) = stored_captures(folder)
    return capture


def test_the_first_samples_of_the_last_epoch_known_ones_first(tmp_path: Path) -> None:
    found = rows_of_samples(captured(tmp_path), 3, {("val", 2)}, 10)
    assert [rows.name for rows in found] == ["val sample 2", "val sample 0", "val sample 1"]
    assert [rows.values.tolist() for rows in found] == [[[1, 3, 2]], [[1, 2, 0]], [[1, 2, 1]]]
    assert (found[0].epochs.item(), found[0].steps.item(), found[0].by_token) == (1, 3, False)


def test_captures_of_firings_have_no_samples(tmp_path: Path) -> None:
    assert rows_of_samples(captured(tmp_path, by_sample=False), 3, set(), 10) == []
