"""The indexes of a folder of shards: valid lines are read back, invalid ones are refused."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hookrun.store.captures.shard import Shard, index_name, index_names, read_index, row_bytes, shard_name
from hookrun.store.files import StoreError
from hookrun.store.format import VERSION, encode


def entry(**changed: Any) -> dict[str, Any]:
    given = {"key": "0", "hook": "h", "module": "m", "path": "", "dtype": "float32", "shape": [2], "rows": 1}
    return {**given, "by": "sample", **changed}


def shard(file: str, *entries: dict[str, Any]) -> dict[str, Any]:
    columns = ["sample", "epoch", "step", "call"]
    return {"shard": file, "sha256": "ab" * 32, "bytes": 4096, "columns": columns, "entries": list(entries)}


ENTRY = entry(module="layer4\n\0", path="[0].logits", dtype="bfloat16", shape=[4, 8], rows=32)
SHARD = shard("000000.safetensors", ENTRY)


def test_a_shard_is_read_from_its_line_without_keys_of_a_later_version() -> None:
    found = Shard.of(SHARD | {"rank": 3, "entries": [ENTRY | {"labels": "0.labels"}]})
    assert (found.file, found.bytes, len(found.columns)) == ("000000.safetensors", 4096, 4)
    assert asdict(found.entries[0]) == ENTRY | {"shape": (4, 8)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": VERSION + 1}, "this hookrun reads up to"),
        ({"shard": "../../other.safetensors"}, "outside of its folder"),
        ({"entries": [{"key": "0"}]}, "does not describe a shard"),
        ({"columns": None}, "does not describe a shard"),
        ({"bytes": "4096"}, "does not describe a shard"),
        ({"columns": ["sample", "epoch"]}, "do not say their step, call"),
        ({"shard": "index.jsonl"}, "cannot be a file of it"),
        ({"bytes": 32 * (32 * 2 + 4 * 8) - 1}, "its rows need 3,072 bytes, and the shard has 3,071"),
        ({"entries": [ENTRY | {"dtype": "qint8"}]}, "unknown dtype 'qint8'"),
    ],
)
def test_an_invalid_line_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Shard.of(SHARD | change)


def test_other_json_is_refused() -> None:
    with pytest.raises(ValueError, match="does not describe a shard"):
        Shard.of([1, 2])


def test_the_bytes_of_a_row_follow_its_dtype() -> None:
    found = [row_bytes(dtype, (2, 3)) for dtype in ("float32", "bfloat16", "bool", "complex128", "uint8")]
    assert found == [24, 12, 6, 96, 6]
    assert row_bytes("float64", ()) == 8


def line(file: str) -> str:
    return encode(shard(file, entry())) + "\n"


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
    shards, notes = read_index(folder)
    assert [shard.file for shard in shards] == ["000000.safetensors", "1_000000.safetensors"]
    assert "the last line is cut off" in notes[0]


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
