"""Rows of captures that belong to single samples."""

from __future__ import annotations

from pathlib import Path

import torch

from hookrun.report.sample_rows import rows_of_samples
from hookrun.report.sampling import Stream, streams
from hookrun.store.writer import CaptureWriter


def captured(folder: Path, by_sample: bool = True) -> Stream:
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
    (stream,) = streams(folder)
    return stream


def test_the_first_samples_of_the_last_epoch_known_ones_first(tmp_path: Path) -> None:
    stream = captured(tmp_path)
    found = rows_of_samples(tmp_path, stream, 3, {("val", 2)}, 10)
    assert [rows.name for rows in found] == ["val sample 2", "val sample 0", "val sample 1"]
    assert [rows.values.tolist() for rows in found] == [[[1, 3, 2]], [[1, 2, 0]], [[1, 2, 1]]]
    assert (found[0].epoch, found[0].step, found[0].by_token) == (1, 3, False)


def test_captures_of_firings_have_no_samples(tmp_path: Path) -> None:
    assert rows_of_samples(tmp_path, captured(tmp_path, by_sample=False), 3, set(), 10) == []
