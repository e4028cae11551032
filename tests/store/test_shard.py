"""The lines of a shard index: valid ones are read back, invalid ones are refused."""

from __future__ import annotations

import json

import pytest

from hookrun.store.format import VERSION, decode, encode
from hookrun.store.shard import Entry, Shard, row_bytes

ENTRY = Entry("0", "features", "layer4\n\0", "[0].logits", "bfloat16", (4, 8), 32, "sample")
SHARD = Shard("000000.safetensors", "ab" * 32, 4096, ("sample", "epoch", "step", "call"), (ENTRY,))


def test_a_shard_is_read_back_from_its_line() -> None:
    assert Shard.of(decode(encode(SHARD.record()).encode())) == SHARD


def test_keys_of_a_later_version_are_ignored() -> None:
    record = json.loads(encode(SHARD.record()))
    record["rank"] = 3
    record["entries"][0]["labels"] = "0.labels"
    assert Shard.of(record) == SHARD


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": VERSION + 1}, "this hookrun reads up to"),
        ({"shard": "../../other.safetensors"}, "outside of its folder"),
        ({"entries": [{"key": "0"}]}, "does not describe a shard"),
        ({"columns": None}, "does not describe a shard"),
        ({"columns": ["sample", "epoch"]}, "do not say their step, call"),
        ({"shard": "index.jsonl"}, "cannot be a file of it"),
        ({"bytes": 32 * (32 * 2 + 4 * 8) - 1}, "its rows need 3,072 bytes, and the shard has 3,071"),
        ({"entries": [SHARD.record()["entries"][0] | {"dtype": "qint8"}]}, "unknown dtype 'qint8'"),
    ],
)
def test_an_invalid_line_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Shard.of(SHARD.record() | change)


def test_other_json_is_refused() -> None:
    with pytest.raises(ValueError, match="does not describe a shard"):
        Shard.of([1, 2])


def test_the_bytes_of_a_row_follow_its_dtype() -> None:
    found = [row_bytes(dtype, (2, 3)) for dtype in ("float32", "bfloat16", "bool", "complex128", "uint8")]
    assert found == [24, 12, 6, 96, 6]
    assert row_bytes("float64", ()) == 8
