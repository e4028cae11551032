"""A stranger's file of text or JSON lines is refused with its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from token_samples import made, prompts, refusal

from hookrun.data import text_files
from hookrun.data.text_files import LONGEST, MOST_LINE
from hookrun.errors import SpecError


def test_a_strangers_file_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for content, said in [
        (b"", "holds no prompt"),
        (b"\n\n", "holds no prompt"),
        (b"[1]", "line 1 is a JSON list"),
        (b'{"prompt": "a"}\n{"prompt"', "line 2 is not JSON"),
        (b"[" * 100_000, "line 1 is not JSON"),
        (b'{"prompt": "a", "n": ' + b"9" * 10_000 + b"}", "line 1 is not JSON"),
        (b'{"prompt": "\xff"}', "line 1 is not UTF-8"),
        (b'{"prompt": "' + b"a" * MOST_LINE + b'"}', "line 1 has more than"),
        (b'{"prompt": "' + b"a" * 5000 + b'"}', "set data.args.length"),
    ]:
        path.write_bytes(content)
        message = refusal("prompts", file=str(path))
        assert said in message, message
    assert "there is no file" in refusal("prompts", file=str(tmp_path / "y.jsonl"))
    assert "does not end in .jsonl" in refusal("prompts", file=str(tmp_path / "x.txt"))
    assert "there is no folder" in refusal("text", file=str(path), tokenizer=str(tmp_path / "tokenizer"))
    assert "no tokenizer that transformers can read" in refusal(
        "text", file=str(path), tokenizer=str(tmp_path)
    )


def test_names_of_a_strangers_file_write_no_control_characters(tmp_path: Path) -> None:
    name = "x\x1b[31mRED\nline\u202e\ud800"
    for line, said in (
        ({"prompt": "a b", "spans": {name: "zz"}}, r"data.args.spans.x\x1b[31mRED\nline\u202e\ud800: "),
        ({name: "a b"}, r"there are: x\x1b[31mRED\nline\u202e\ud800"),
        ({f"prompt{name}": "a b"}, "has no field 'prompt'"),
    ):
        message = refusal("prompts", file=prompts(tmp_path, line))
        assert said in message, message
        assert all(each.isprintable() for each in message.splitlines())


def test_a_byte_order_mark_is_not_text_and_the_number_of_lines_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"\xef\xbb\xbfa\nb\n\nc")
    assert list(text_files.lines(path, "key")) == [(1, "a\n"), (2, "b\n"), (3, "\n"), (4, "c")]
    monkeypatch.setattr(text_files, "MOST_LINES", 3)
    with pytest.raises(SpecError, match=r"key: .* has more than 3 lines"):
        list(text_files.lines(path, "key"))


def test_a_stamp_changes_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.txt"
    path.write_text("a")
    before = text_files.checked_file("x.txt", tmp_path, "key", (".txt",))
    path.write_text("ab")
    assert text_files.checked_file("x.txt", tmp_path, "key", (".txt",)) != before
    monkeypatch.setattr(text_files, "MOST_FILE", 1)
    with pytest.raises(SpecError, match="at most 0 are read"):
        text_files.checked_file("x.txt", tmp_path, "key", (".txt",))


def test_too_many_tokens_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.txt"
    path.write_text("abcde")
    monkeypatch.setattr(text_files, "MOST_TOKENS", 4)
    assert "data.args.file: the file has more than 4 tokens" in refusal("text", file=str(path))
    assert "the file has more than 4" in refusal("prompts", file=prompts(tmp_path, {"prompt": "abcde"}))


def test_samples_are_as_long_as_the_longest_unless_padding_to_it_costs_too_much(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    for length in (3, LONGEST + 1):
        path.write_text("a\n" + "b" * length)
        if length == 3:
            assert made("text", file=str(path), packed=False, val_fraction=1)[0].length == 3
    assert "data.args.length: the longest has 4,097 tokens" in refusal("text", file=str(path), packed=False)
    assert made("text", file=str(path), packed=False, val_fraction=1, length=7)[0].length == 7
