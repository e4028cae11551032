"""The limits of records in a run directory; the first mistake is reported without its value."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest
from pydantic import ValidationError

from hookrun.store.captures.shard import Entry
from hookrun.store.files import StoreError
from hookrun.store.records import (
    MOST_METRICS,
    MetricsLine,
    PictureLine,
    PlanRecord,
    Record,
    SampleLine,
    Status,
    checked,
    read_record,
    read_records,
)

ENTRY = {
    "key": "0", "hook": "h", "module": "m", "path": "", "dtype": "float32", "shape": [2], "rows": 3, "by": "sample",
}  # fmt: skip


def test_unknown_keys_of_other_versions_are_accepted() -> None:
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
        (ENTRY | {"rows": "3"}, Entry, "found a str: input should be a valid integer (rows)"),
        (ENTRY | {"rows": True}, Entry, "found a bool: input should be a valid integer (rows)"),
        (ENTRY | {"rows": 2**53 + 1}, Entry, "input should be less than or equal to 9007199254740992 (rows)"),
        (
            ENTRY | {"rows": None, "by": "row"},
            Entry,
            "found nothing: input should be a valid integer (rows, and 1 more)",
        ),
        ({"hooks": [{"name": "a"}, {}, {}]}, PlanRecord, "it has no name (hooks.1.name)"),
    ],
)
def test_the_first_mistake_is_reported_with_its_place(value: Any, model: type[Record], said: str) -> None:
    with pytest.raises(ValueError) as refusal:
        checked(value, model)
    assert str(refusal.value) == said


def test_a_record_is_read_as_the_mapping_that_was_written(tmp_path) -> None:
    path = tmp_path / "status.json"
    path.write_text('{"status": "done", "later": [1]}')
    assert read_record(path, Status) == {"status": "done", "later": [1]}
    path.write_text('{"status": 3}')
    with pytest.raises(StoreError, match=r"status\.json: found an int: .* \(status\)"):
        read_record(path, Status)


def test_a_wrong_line_is_named(tmp_path) -> None:
    path = tmp_path / "samples.jsonl"
    good = '{"split": "val", "sample": 0, "file": "a"}\n'
    path.write_text(good + good[:20])
    assert read_records(path, SampleLine) == [{"split": "val", "sample": 0, "file": "a"}]
    path.write_text(good + good)
    lines = read_records(path, SampleLine)
    assert all(key is same for key, same in zip(*lines, strict=True)), "keys are in memory once, not per line"
    path.write_text(good + good.replace('"a"', "0") + good)
    with pytest.raises(StoreError, match=r"samples\.jsonl, line 2: .* \(file\)"):
        read_records(path, SampleLine)


PNG = b64encode(b"\x89PNG\r\n\x1a\n" + bytes(12)).decode()
PICTURE = {"split": "val", "sample": 0, "png": PNG}
METRICS = {"split": "val", "of": "epoch", "loss": 0.5, "step": 3, "ok": True, "note": None}


def test_lines_are_accepted_with_keys_that_may_be_there() -> None:
    MetricsLine.model_validate(METRICS)
    assert PictureLine.model_validate(PICTURE).png == PNG


WRONG: list[tuple[type[Record], dict[str, Any], list[dict[str, Any]]]] = [
    (MetricsLine, METRICS, [{"loss": [0.5]}, {"m" * 1001: 1}, {"of": "week"}]),
    (MetricsLine, METRICS, [{f"m{number}": 1 for number in range(MOST_METRICS + 1)}]),
    (PictureLine, PICTURE, [{"png": ""}, {"png": b64encode(b"<svg onload=x>").decode()}]),
    (PictureLine, PICTURE, [{"png": PNG + more} for more in ('" onload="x', "\n<", "A" * 2**17)]),
]


@pytest.mark.parametrize(
    ("model", "line", "change"), [(model, line, each) for model, line, changes in WRONG for each in changes]
)
def test_a_line_with_a_value_beyond_its_limits_is_refused(
    model: type[Record], line: dict[str, Any], change: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError):
        model.model_validate(line | change)
