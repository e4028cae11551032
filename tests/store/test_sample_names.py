"""Names of samples and texts of tokens, read from a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hookrun.store.files import StoreError
from hookrun.store.sample_names import SampleTable


def test_names_by_split_and_sample_and_texts_by_token(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text(
        '{"split": "train", "sample": 0, "file": "a.png", "class": "cat"}\n'
        '{"split": "val", "sample": 0, "file": "b.png"}\n'
    )
    (tmp_path / "tokens.jsonl").write_text('{"token": 7, "text": " the"}\n')
    table = SampleTable(tmp_path)
    asked = [("val", 0), ("train", 0), ("train", 1)]
    assert table.column("file", asked) == ["b.png", "a.png", ""]
    assert table.column("class", asked) == ["", "cat", ""]
    assert (table.text(7), table.text(8)) == (" the", "")


def test_a_run_without_names_has_an_empty_table(tmp_path: Path) -> None:
    table = SampleTable(tmp_path)
    assert (table.lines, table.text(0), table.column("file", [("val", 0)])) == ([], "", [""])


def test_a_link_is_an_error_and_not_an_empty_table(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreError):
        _ = SampleTable(tmp_path).lines
