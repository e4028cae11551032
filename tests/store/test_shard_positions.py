"""Positions of the shards of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hookrun.ranks.alone import ALONE, Ranks
from hookrun.store.position import PositionRecord
from hookrun.store.shard_positions import shard_positions
from hookrun.store.writer import CaptureWriter

NOTHING = {"index": 0, "shards": 0, "counts": {}, "turns": False}
BEFORE = {"index": 90, "shards": 2, "counts": {"h": {"m": (1, 8, 2)}}, "turns": True}


class Three(Ranks):
    """Rank 0 of three; the others have the same position."""

    size = 3

    def gathered(self, plain: Any) -> list[Any]:
        return [plain, plain, plain]


def test_buffered_rows_are_written_and_counted(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path / "captures")
    writer.add("h", "m", torch.ones(2, 3), sample_ids=[0, 1], epoch=0, step=0, call=0)
    found = shard_positions(ALONE, {"captures": writer}, None)
    captures = found["captures"]
    assert captures["index"] == (tmp_path / "captures/index.jsonl").stat().st_size > 0
    assert (captures["shards"], captures["others"]) == (1, [])
    assert found["predictions"] == NOTHING | {"others": []}
    writer.close()


def test_a_folder_without_a_writer_keeps_its_position() -> None:
    reached = PositionRecord.model_validate({"captures": BEFORE | {"others": [BEFORE | {"index": 5}]}})
    found = shard_positions(Three(), {}, reached)["captures"]
    assert {key: found[key] for key in BEFORE} == BEFORE
    assert [each["index"] for each in found["others"]] == [90, 90]


def test_positions_of_ranks_that_no_longer_exist_are_kept() -> None:
    others = [BEFORE | {"index": index} for index in (5, 6)]
    reached = PositionRecord.model_validate({"captures": BEFORE | {"others": others}})
    found = shard_positions(ALONE, {}, reached)["captures"]
    assert [each["index"] for each in found["others"]] == [5, 6]
