"""The page of a run that generated, and of a stranger's directory with generations.jsonl."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_pages import write_lines

import hookrun
from hookrun.report import write_report
from hookrun.store.files import StoreError
from hookrun.studies.generate.page import changed_places

LINE: dict[str, Any] = {
    "sample": 0, "split": "val", "prompt": "a prompt <b>&", "prompt_ids": [1, 2], "text": "one two",
    "ids": [3, 4], "reason": "length", "next": [[3, "one", 0.5], [4, "two", 0.25]],
    "text_without": "one three", "ids_without": [3, 5], "reason_without": "end",
    "next_without": [[3, "one", 0.75]], "kl_first": 0.125,
}  # fmt: skip


@pytest.fixture
def page(tmp_path: Path) -> Callable[..., str]:
    """The page of a directory with these lines in generations.jsonl."""

    def page(*lines: Any, texts: tuple[tuple[int, str], ...] = ()) -> str:
        (tmp_path / "status.json").write_text(json.dumps({"status": "done"}))
        written = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (tmp_path / "generations.jsonl").write_text("".join(f"{line}\n" for line in written))
        write_lines(tmp_path / "tokens.jsonl", ({"token": token, "text": text} for token, text in texts))
        return write_report(tmp_path).read_text()

    return page


def test_both_continuations_are_shown_side_by_side(page) -> None:
    source = page(LINE, texts=((3, "one"), (4, "two"), (5, "three")))
    assert "With hooks 1 of 1 sample continued differently" in source
    assert "KL 0.125 nats" in source
    assert re.findall("<mark>(.*?)</mark>", source) == ["three ", "two "]
    assert "a prompt &lt;b&gt;&amp;" in source
    rows = [
        re.findall("<td[^>]*>([^<]*)", row) for row in source.split("<tr>") if 'class="probabilities"' in row
    ]
    assert [row[:3] for row in rows] == [
        ["&#39;one&#39;", "75.0%", "50.0%"],
        ["&#39;two&#39;", "&lt; 75.0%", "25.0%"],
    ]
    alone = {
        key: LINE[key] for key in ("sample", "split", "prompt", "prompt_ids", "text", "ids", "reason", "next")
    }
    assert "without hooks" not in page(alone)
    assert "one two" in page(alone).replace("\n", "")


def test_only_changed_probabilities_are_open(page: Callable[..., str]) -> None:
    same = {**LINE, "ids_without": LINE["ids"], "text_without": LINE["text"], "next_without": LINE["next"]}
    assert "<details open><summary>the most probable" in page(LINE)
    assert "<details><summary>the most probable" in page({**same, "kl_first": 0.0})
    assert "<details open><summary>the most probable" in page({**same, "next_without": [[3, "one", 0.75]]})


def test_the_marked_difference_is_between_the_equal_ends() -> None:
    assert changed_places("abcd", "aXcd") == ([False, True, False, False],) * 2
    assert changed_places("abcd", "ad") == ([False, True, True, False], [False, False])
    assert changed_places("", "ab") == ([], [True, True])
    assert changed_places("aa", "aaa") == ([False, False], [False, False, True])


def test_a_strangers_file_does_not_break_the_page(page: Callable[..., str], tmp_path: Path) -> None:
    strange = [
        {**LINE, "ids": "all"},
        {**LINE, "next": [[1, "a"]]},
        {**LINE, "reason": "<script>"},
        {**LINE, "ids": [1] * (2**20 + 1)},
        "{",
        '{"sample": ' + "9" * 200 + "}",
        "[" * 1000,
    ]
    hostile = {
        **LINE,
        "sample": 1,
        "prompt": "\u202e<script>alert(1)</script>" + "x" * 500_000,
        "text": "y" * 300_000,
        "next": [[3, "\u202e" * 1000, "Infinity"], [2**53, None, -5]],
        "kl_first": "NaN",
    }
    many = [{**LINE, "sample": number, "ids": [7] * 3000, "text": "z " * 3000} for number in range(300)]
    source = page(*strange, hostile, *many)
    assert "<script>alert" not in source
    assert "\u202e" not in source
    assert len(source) < 3_000_000
    assert "and 2,600 more" in source
    assert "lines are not valid records and left out" in source
    with pytest.raises(StoreError, match=r"generations\.jsonl, line 1"):
        hookrun.open_run(tmp_path).generations  # noqa: B018 - reading it raises
