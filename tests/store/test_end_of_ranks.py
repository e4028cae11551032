"""At the end rank 0 sees all that the ranks have written, or fails with the file that it does not see."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hookrun.run.passes.over_ranks import counts_of_all
from hookrun.run.ranks import Ranks
from hookrun.store.files import StoreError
from hookrun.store.reader import open_run
from hookrun.store.run_dir import RunDir
from hookrun.store.verify import verify

INDEX = "captures/index_1.jsonl"
SHARD = "captures/1_000000.safetensors"
BOTH = pytest.mark.parametrize("name", [INDEX, SHARD])


@pytest.fixture
def main(tmp_path: Path) -> RunDir:
    """The directory of rank 0 when the ranks have closed it."""
    made = RunDir.create(tmp_path)
    sent = list[Any]()
    made.ranks = Two(0, sent)
    return captured(made, sent)


@BOTH
def test_rank_0_waits_for_what_a_disk_shows_late(name: str, main, tmp_path, monkeypatch) -> None:
    (tmp_path / name).rename(tmp_path / "away")
    waited = list[float]()

    def come(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            (tmp_path / "away").rename(tmp_path / name)

    monkeypatch.setattr(time, "sleep", come)
    main.see_ranks(60)
    assert len(waited) == 3
    main.write_manifest()
    main.set_status("done")
    rows = open_run(tmp_path).captures["h"]["m"]
    assert verify(tmp_path).bad == []
    assert len(rows) == 8
    (tmp_path / name).unlink()
    assert any(f"{name} is missing" in line for line in verify(tmp_path).bad)


@BOTH
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 100)])
def test_a_file_of_another_rank_that_is_not_there_whole_is_named(name: str, damage, main, tmp_path) -> None:
    size = (tmp_path / name).stat().st_size
    damage(tmp_path / name)
    said = rf"rank 1 on .* wrote {name} \({size:,} bytes\), which rank 0 does not see: the run directory has to be on"
    with pytest.raises(StoreError, match=said):
        main.see_ranks(0)


def test_captured_rows_without_an_index_are_told(main) -> None:
    main.captures.counts["h", "m"].rows += 1
    with pytest.raises(StoreError, match=r"the ranks captured 9 rows of h at 'm', and .*captures has 8"):
        main.see_ranks(0)


@pytest.mark.parametrize("name", [SHARD, "captures/000000.safetensors"])
def test_no_manifest_is_written_of_a_shard_that_is_cut_off(name: str, main, tmp_path) -> None:
    main.see_ranks(0)
    os.truncate(tmp_path / name, 100)
    with pytest.raises(StoreError, match=f"has lost files that were written to it: {name}"):
        main.write_manifest()


def test_a_run_without_captures_waits_for_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.delattr(time, "sleep")
    sent = list[Any]()
    main = RunDir.create(tmp_path)
    RunDir(tmp_path, ranks=Two(1, sent)).see_ranks(60)
    main.ranks = Two(0, sent)
    main.see_ranks(60)
    main.write_manifest()


def test_the_index_of_a_former_rank_is_required(tmp_path) -> None:
    first = RunDir.create(tmp_path)
    sent = list[Any]()
    first.ranks = Two(0, sent)
    captured(first, sent)
    index = {"counts": {}, "turns": True, "shards": 1}
    own = (tmp_path / "captures/index.jsonl").stat().st_size
    other = (tmp_path / INDEX).stat().st_size
    position = {"captures": {**index, "index": own, "others": [{**index, "index": other}]}}
    again = RunDir.reopen(tmp_path, position)
    again.set_status("running")
    again.close()
    again.see_ranks(0)
    again.write_manifest()
    (tmp_path / INDEX).unlink()
    with pytest.raises(StoreError, match=f"has lost files that were written to it: {INDEX}"):
        again.write_manifest()


class Two(Ranks):
    """One of two ranks: rank 1 puts what it sends into the list `sent`, from which rank 0 takes it later."""

    size = 2
    several = True

    def __init__(self, rank: int, sent: list[Any]) -> None:
        self.rank, self._sent = rank, sent

    def gathered(self, plain: Any) -> list[Any]:
        if not self.is_main:
            self._sent.append(plain)
            return [plain, plain]
        return [plain, self._sent.pop(0)]


def captured(main: RunDir, sent: list[Any], **more: Any) -> RunDir:
    """Both ranks capture four rows and close the directory; rank 1 has sent its position and what it wrote."""
    other = RunDir(main.path, ranks=Two(1, sent), **more)
    main.set_status("running")
    for run in (main, other):
        run.captures.add("h", "m", torch.ones(4, 100), sample_ids=range(4), epoch=0, step=0, call=0)
    counts_of_all(other.captures.counts, other.ranks)
    counts_of_all(main.captures.counts, main.ranks)
    other.close()
    main.close()
    other.see_ranks(0)
    return main
