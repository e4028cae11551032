"""The state of a pass is saved as soon as rows are on the disk, and at intervals."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch

from hookrun.store.run_dir import RunDir
from hookrun.store.states import SECONDS
from hookrun.tasks.loop.passing import DurableRows, PartialPass
from hookrun.tasks.loop.resuming import Resuming


class Points:
    """Saves as a run does, and records when."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir, self.due = run_dir, list[bool]()
        self.seconds = 0.0

    def point(self, due: bool = False) -> bool:
        self.due.append(due)
        if due:
            self.run_dir.position()
            self.seconds = 0.0
        return due


def test_a_state_follows_the_rows_that_are_on_the_disk_and_the_time(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path, buffer=3 * 2**15)
    points = Points(run_dir)
    rows = DurableRows(run_dir, cast(Resuming, points))
    for number in range(6):
        size = 2**14 if number == 2 else 8  # fills more than a shard
        value = torch.ones(4, size)
        run_dir.captures.add("h", "fc", value, sample_ids=range(4), epoch=0, step=number, call=0)
        run_dir.captures._disk.wait()
        points.seconds = SECONDS if number == 4 else SECONDS - 1
        rows.point()
    assert points.due == [False, False, True, False, True, False]
    again = RunDir.reopen(tmp_path, run_dir.position())
    assert again.shards == run_dir.shards > 2, "also before its writers are made"


def test_a_pass_continues_with_its_sums() -> None:
    one = PartialPass(7, {"inner": PartialPass(3)}, batches=2)
    other = PartialPass(0, {"inner": PartialPass(0)})
    other.load_state_dict(one.state_dict())
    assert other == one
