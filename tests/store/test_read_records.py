"""Records are read as they were written; a record that does not fit its model is an error that names the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from hookrun.store.files import StoreError
from hookrun.store.read_records import read_record, read_records
from hookrun.store.records import SAMPLES_LINE, Status


def test_a_record_is_read_as_the_mapping_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    path.write_text('{"status": "done", "later": [1]}')
    assert read_record(path, Status) == {"status": "done", "later": [1]}
    path.write_text('{"status": 3}')
    with pytest.raises(StoreError, match=r"status\.json: found an int: .* \(status\)"):
        read_record(path, Status)


def test_a_wrong_line_is_named_and_an_incomplete_last_one_left_out(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    good = '{"split": "val", "sample": 0, "file": "a"}\n'
    path.write_text(good + good[:20])
    assert read_records(path, SAMPLES_LINE) == [{"split": "val", "sample": 0, "file": "a"}]
    path.write_text(good + good.replace('"a"', "0") + good)
    with pytest.raises(StoreError, match=r"samples\.jsonl, line 2: .* \(file\)"):
        read_records(path, SAMPLES_LINE)
