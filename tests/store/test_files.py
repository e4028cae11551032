"""Files are complete or absent, lines and JSON are read back equal, and only regular files are opened."""

from __future__ import annotations

import csv
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hookrun.store.files import (
    Lines,
    MissingFile,
    StoreError,
    kind_of,
    listed_inside,
    read_inside,
    read_json,
    read_lines,
    replacing,
    write_json,
    write_table,
)
from hookrun.store.format import decode, encode


def records(path: Path) -> tuple[list[object], list[str]]:
    notes = list[str]()
    return [record for _, record in read_lines(path, notes=notes)], notes


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_file_gets_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert not path.exists()
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["plan.json"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_previous_file_survives_a_failure(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"old")
    with pytest.raises(error), replacing(path) as file:
        file.write(b"half of the n")
        raise error
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["plan.json"]


def test_the_file_is_flushed_before_the_renaming(tmp_path, monkeypatch) -> None:
    done: list[str] = []
    fsync = os.fsync
    replace = os.replace

    def record_fsync(file: int) -> None:
        done.append("folder" if os.path.samestat(os.fstat(file), tmp_path.stat()) else "file")
        fsync(file)

    def record_replace(source: Path, target: Path) -> None:
        done.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    write_json(tmp_path / "plan.json", {})
    assert done == ["file", "rename", "folder"]
    done.clear()
    with replacing(tmp_path / "report.html", flushes=False, flushes_folder=False) as file:
        file.write(b"what can be made again")
    assert done == ["rename"]
    assert (tmp_path / "report.html").read_bytes() == b"what can be made again"


def test_each_line_is_readable_at_once(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "metrics.jsonl")
    assert names(tmp_path) == []
    for step in range(3):
        lines.extend([{"step": step}])
        assert records(lines.path) == ([{"step": number} for number in range(step + 1)], [])
        lines.close()  # a later line opens the file again


def test_a_partial_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:3]))
    lines = Lines(tmp_path / "metrics.jsonl")
    lines.extend([{"loss": 0.125}])
    lines.close()
    assert lines.path.read_text() == '{"loss": 0.125}\n'


def test_an_interrupted_line_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def interrupted(file: int, data: memoryview) -> int:
        write(file, data[:5])
        raise KeyboardInterrupt

    lines = Lines(tmp_path / "metrics.jsonl")
    lines.extend([{"step": 0}])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "write", interrupted)
        lines.extend([{"step": 1}])
    lines.extend([{"step": 2}])
    lines.close()
    assert records(lines.path) == ([{"step": 0}, {"step": 2}], [])


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_an_incomplete_last_line_is_reported(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + b'{"loss": 1.25}\n'[:cut])
    note = f"{path}: the last line is cut off and left out; 1 before it are whole"
    assert records(path) == ([{"step": 0}], [note])
    path.write_bytes(b'{"step": 0}\n{"step": 1}')
    assert records(path) == ([{"step": 0}, {"step": 1}], []), "without its newline it counts if it parses"


def test_a_broken_line_before_the_last_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(StoreError, match=r"metrics\.jsonl, line 2: not JSON"):
        records(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert records(tmp_path / "stats.jsonl") == ([], [])
    with pytest.raises(StoreError, match=rf"cannot read {tmp_path}/plan\.json: No such file"):
        read_json(tmp_path / "plan.json")
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(StoreError, match=r"plan\.json is not JSON"):
        read_json(tmp_path / "plan.json")


def test_a_regular_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    path = tmp_path / "a/b"
    path.write_bytes(b"12345")
    assert read_inside(path, tmp_path, limit=5) == b"12345"
    with pytest.raises(StoreError, match="it has 5 bytes, more than the 4 that are read"):
        read_inside(path, tmp_path, limit=4)
    with pytest.raises(MissingFile):
        read_inside(tmp_path / "a/c", tmp_path, limit=4)


def test_names_are_listed_with_links_that_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "b/c").mkdir(parents=True)
    (tmp_path / "b/c/file").write_text("")
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "z").symlink_to(tmp_path / "nowhere")
    found = {path: kind_of(stat) for path, stat in listed_inside(tmp_path)}
    assert set(found) == {"a", "z", "b/c/file"}
    assert found["b/c/file"] == ""
    assert found["a"].startswith("a link")
    assert os.path.lexists(tmp_path / "z")
    assert not os.path.lexists(tmp_path / "y")
    assert list(listed_inside(tmp_path, "none")) == []


def test_a_vanishing_file_hides_no_other(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).touch()
    entries = listed_inside(tmp_path)
    assert next(entries)[0] == "a"
    (tmp_path / "b").unlink()
    with pytest.raises(StoreError, match=f"cannot list {tmp_path}"):
        next(entries)


numbers = st.floats() | st.integers()
words = st.sampled_from(["NaN", "Infinity", "-Infinity", "\\NaN", "\\\\-Infinity", "nan"])
texts = st.text() | words
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


def refuse(word: str) -> float:
    raise AssertionError(f"{word} is not JSON")


@given(values)
def test_every_value_is_read_back_equal(value: object) -> None:
    assert repr(decode(encode(value).encode())) == repr(value)  # by repr: NaN is not equal to itself


@given(values)
def test_every_line_is_strict_json_in_ascii(value: object) -> None:
    text = encode(value)
    assert text.isascii()
    assert "\n" not in text
    json.loads(text, parse_constant=refuse)


def test_numbers_of_numpy_are_accepted() -> None:
    found = {"loss": torch.tensor(0.5), "bad": torch.tensor(math.nan), "n": np.int64(3), "at": Path("a/b")}
    assert encode(found) == '{"loss": 0.5, "bad": "NaN", "n": 3, "at": "a/b"}'


@pytest.mark.parametrize("value", [{"x": object()}, {"x": torch.zeros(2)}, {(1, 2): 0}, {"x": {1, 2}}])
def test_other_types_are_refused_by_name(value: object) -> None:
    with pytest.raises(TypeError, match=r"in JSON|as JSON"):
        encode(value)


def test_a_table_holds_no_text_that_a_spreadsheet_computes(tmp_path: Path) -> None:
    formulas = ["=1", "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "-x"]
    kept = ["-0.5", "-1e-05", "+3", "-inf", -0.5, -7, "a=1", "", None]
    write_table(tmp_path / "x.csv", [["=head", "a"], *([text, -1] for text in formulas), kept])
    with (tmp_path / "x.csv").open(newline="") as file:
        head, *rows = list(csv.reader(file))
    assert head == ["'=head", "a"]
    assert rows[:-1] == [[f"'{text}", "-1"] for text in formulas]
    assert rows[-1] == ["" if cell is None else str(cell) for cell in kept]
