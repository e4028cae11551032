"""The indexes of a folder of shards: that of rank 0 first, then those of the other ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from hookrun.store.files import StoreError
from hookrun.store.format import encode
from hookrun.store.indexes import index_name, index_names, read_index, shard_name
from hookrun.store.shard import Entry, Shard

COLUMNS = ("sample", "epoch", "step", "call")


def line(file: str) -> str:
    entry = Entry("0", "h", "m", "", "float32", (2,), 1, "sample")
    return encode(Shard(file, "ab" * 32, 4096, COLUMNS, (entry,)).record()) + "\n"


def test_each_rank_has_its_index_and_its_names_of_shards(tmp_path: Path) -> None:
    assert [index_name(0), index_name(12)] == ["index.jsonl", "index_12.jsonl"]
    assert [shard_name(0, 3), shard_name(12, 3)] == ["000003.safetensors", "12_000003.safetensors"]
    for name in ("index_10.jsonl", "index_2.jsonl", "index_02.jsonl", "index_x.jsonl"):
        (tmp_path / name).write_text("")
    assert index_names(tmp_path) == ["index.jsonl", "index_2.jsonl", "index_10.jsonl"]
    assert index_names(tmp_path / "none") == ["index.jsonl"]


def test_shards_of_all_ranks_are_read_and_a_cut_line_is_noted(tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    folder.mkdir()
    (folder / "index.jsonl").write_text(line(shard_name(0, 0)) + line(shard_name(0, 1))[:40])
    (folder / "index_1.jsonl").write_text(line(shard_name(1, 0)))
    shards, note = read_index(folder)
    assert [shard.file for shard in shards] == ["000000.safetensors", "1_000000.safetensors"]
    assert "the last line is cut off" in note


def test_a_shard_in_two_lines_and_a_line_of_no_shard_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    folder.mkdir()
    (folder / "index.jsonl").write_text(line("a"))
    (folder / "index_1.jsonl").write_text(line("b") + line("a"))
    with pytest.raises(StoreError, match=r"index_1\.jsonl, line 2: the shard 'a' is in an earlier line"):
        read_index(folder)
    (folder / "index_1.jsonl").write_text(line("../b"))
    with pytest.raises(StoreError, match=r"index_1\.jsonl, line 1: .*outside of its folder"):
        read_index(folder)
