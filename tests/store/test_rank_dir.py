"""Other ranks than 0 collect their records for rank 0 in the format of its files, and write none of these files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from hookrun.ranks.alone import ALONE, Ranks
from hookrun.store.format import STATS
from hookrun.store.rank_dir import RankDir, take_kept
from hookrun.store.reader import open_run
from hookrun.store.run_dir import RunDir


class Two(Ranks):
    """Rank 0 of two; the other one sends `sent`."""

    size, several = 2, True

    def __init__(self, sent: Any) -> None:
        self.sent = sent

    def gathered(self, plain: Any) -> list[Any]:
        return [plain, self.sent]


def test_numbers_of_every_kind_reach_rank_0_as_it_would_write_them(tmp_path: Path) -> None:
    record = {
        "hook": "h",
        "module": "m",
        "mean": np.float32(0.5),
        "n": [np.int64(3)],
        "x": float("nan"),
        "t": "NaN",
    }
    main = RunDir.create(tmp_path)
    main.set_status("running")
    main.append(STATS, [record])
    other = RankDir(tmp_path, Two([]))
    other.append(STATS, [record])
    main.ranks = Two(json.loads(json.dumps(other.kept)))
    take_kept(main)
    main.close()
    first, second = (tmp_path / "stats.jsonl").read_text().splitlines()
    assert first == second and len(open_run(tmp_path).stats) == 2


def test_only_rank_0_writes_the_files_of_the_run(tmp_path: Path) -> None:
    main = RunDir.create(tmp_path)
    main.write_pictures([{"split": "val", "sample": 0, "png": ""}])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    other = RankDir(tmp_path, ALONE)
    other.write_pictures([{"split": "val", "sample": 1, "png": ""}])
    other.set_status("done")
    other.write_manifest()
    other.sync()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
