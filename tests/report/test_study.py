"""The trials of an optimizing sweeper."""

from __future__ import annotations

from pathlib import Path

import pytest

from hookrun.report.study import Trial, read_study
from hookrun.store.files import StoreError


def test_trials_are_read_in_order_and_a_failed_one_has_no_value(tmp_path: Path) -> None:
    assert read_study(tmp_path) == []
    (tmp_path / "study.jsonl").write_text(
        '{"number": 0, "job": "0", "params": {"lr": "0.1"}, "value": 0.5}\n{"number": 1, "job": "1", "params": {}}\n'
    )
    assert read_study(tmp_path) == [Trial(0, "0", {"lr": "0.1"}, 0.5), Trial(1, "1", {}, None)]


def test_a_line_of_another_form_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "study.jsonl").write_text('{"number": 0, "job": "0", "params": {"lr": 0.1}}\n{}\n')
    with pytest.raises(StoreError, match=r"study\.jsonl, line 1"):
        read_study(tmp_path)
