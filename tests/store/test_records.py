"""The limits of records in a run directory; the first mistake is reported without its value."""

from __future__ import annotations

from typing import Any

import pytest

from hookrun.store.records import (
    METRICS_LINE,
    MOST_METRICS,
    EntryRecord,
    PlanRecord,
    Record,
    SampleLine,
    ShardRecord,
    Status,
    checked,
)

ENTRY = {
    "key": "0", "hook": "h", "module": "m", "path": "", "dtype": "float32", "shape": [2], "rows": 3, "by": "sample",
}  # fmt: skip


def test_missing_and_unknown_keys_of_other_versions_are_accepted() -> None:
    assert checked({}, PlanRecord).hooks == []
    assert checked({"status": "done", "later": {"a": 1}}, Status).manifest is None
    assert checked({"split": "val", "sample": 0, "class": "cat"}, SampleLine).label == "cat"


@pytest.mark.parametrize(
    ("value", "model", "said"),
    [
        ([], Status, "found a list, expected a mapping"),
        ({}, Status, "it has no status (status)"),
        ({"status": 1}, Status, "found an int: input should be a valid string (status)"),
        (
            {"status": "done", "manifest": "AB" * 32},
            Status,
            "string should match pattern '^[0-9a-f]{64}$' (manifest)",
        ),
        ({"status": "done", "pid": 0}, Status, "input should be greater than or equal to 1 (pid)"),
        (ENTRY | {"rows": "3"}, EntryRecord, "found a str: input should be a valid integer (rows)"),
        (ENTRY | {"rows": True}, EntryRecord, "found a bool: input should be a valid integer (rows)"),
        (
            ENTRY | {"rows": 2**53 + 1},
            EntryRecord,
            "input should be less than or equal to 9007199254740992 (rows)",
        ),
        (
            ENTRY | {"rows": None, "by": "row"},
            EntryRecord,
            "found nothing: input should be a valid integer (rows, and 1 more)",
        ),
        ({"hooks": [{"name": "a"}, {}, {}]}, PlanRecord, "it has no name (hooks.1.name)"),
    ],
)
def test_the_first_mistake_is_reported_with_its_place(value: Any, model: type[Record], said: str) -> None:
    with pytest.raises(ValueError) as refusal:
        checked(value, model)
    assert str(refusal.value) == said


def test_a_value_of_any_length_does_not_make_a_long_message() -> None:
    for value in ({"hooks": {"x" * 10**6: 1}}, {"a\n" * 10**5: "b" * 10**6, "hash": "c" * 10**6}):
        with pytest.raises(ValueError) as refusal:
            checked(value, PlanRecord)
        assert len(str(refusal.value)) < 300


def test_metrics_are_scalars_under_short_names_and_not_too_many() -> None:
    METRICS_LINE.validate_python(
        {"split": "val", "of": "epoch", "loss": 0.5, "step": 3, "ok": True, "note": None}
    )
    for line in (
        {"loss": [0.5]},
        {"m" * 1001: 1},
        {"of": "week"},
        {f"m{number}": 1 for number in range(MOST_METRICS + 1)},
    ):
        with pytest.raises(ValueError):
            METRICS_LINE.validate_python(line)


def test_a_shard_s_hash_and_name_are_limited() -> None:
    line = {"version": 1, "shard": "a", "sha256": "0" * 64, "bytes": 1, "columns": [], "entries": [ENTRY]}
    assert checked(line, ShardRecord).entries[0].rows == 3
    for change in (
        {"sha256": "0" * 63},
        {"shard": ""},
        {"shard": "a" * 256},
        {"entries": [ENTRY | {"shape": [1] * 65}]},
    ):
        with pytest.raises(ValueError):
            checked(line | change, ShardRecord)
