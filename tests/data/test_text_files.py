"""A user's own text, packed or document by document; a stranger's file is refused with its place."""

from __future__ import annotations

import pytest
from token_samples import made, prompts, real, refusal

from hookrun.data import text_files
from hookrun.data.samples import IGNORED
from hookrun.data.source import checked_file
from hookrun.data.text_files import LONGEST, MOST_LINE
from hookrun.errors import SpecError


def test_a_strangers_file_is_refused_with_its_place(tmp_path) -> None:
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
    assert "no tokenizer that" in refusal("text", file=str(path), tokenizer=str(tmp_path))


def test_names_of_a_strangers_file_write_no_control_characters(tmp_path) -> None:
    name = "x\x1b[31mRED\nline\u202e\ud800"
    for line, said in (
        ({"prompt": "a b", "spans": {name: "zz"}}, r"data.args.spans.x\x1b[31mRED\nline\u202e\ud800: "),
        ({name: "a b"}, r"there are: x\x1b[31mRED\nline\u202e\ud800"),
        ({f"prompt{name}": "a b"}, "has no field 'prompt'"),
    ):
        message = refusal("prompts", file=prompts(tmp_path, line))
        assert said in message, message
        for each in message.splitlines():
            assert each.isprintable()


def test_a_byte_order_mark_is_not_text(tmp_path, monkeypatch) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"\xef\xbb\xbfa\nb\n\nc")
    assert list(text_files.lines(path, "key")) == [(1, "a\n"), (2, "b\n"), (3, "\n"), (4, "c")]
    monkeypatch.setattr(text_files, "MOST_LINES", 3)
    with pytest.raises(SpecError, match=r"key: .* has more than 3 lines"):
        list(text_files.lines(path, "key"))


def test_a_stamp_changes_with_the_file(tmp_path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("a")
    before = checked_file("x.txt", tmp_path, "key", (".txt",))
    path.write_text("ab")
    assert checked_file("x.txt", tmp_path, "key", (".txt",)) != before
    with pytest.raises(SpecError, match="at most 0 are read"):
        checked_file("x.txt", tmp_path, "key", (".txt",), 1)


def test_too_many_tokens_are_refused(tmp_path, monkeypatch) -> None:
    path = tmp_path / "x.txt"
    path.write_text("abcde")
    monkeypatch.setattr(text_files, "MOST_TOKENS", 4)
    assert "data.args.file: the file has more than 4 tokens" in refusal("text", file=str(path))
    assert "the file has more than 4" in refusal("prompts", file=prompts(tmp_path, {"prompt": "abcde"}))


def test_the_longest_sets_the_length_unless_it_is_too_long(tmp_path) -> None:
    path = tmp_path / "x.txt"
    for length in (3, LONGEST + 1):
        path.write_text("a\n" + "b" * length)
        if length == 3:
            assert made("text", file=str(path), packed=False, val_fraction=1)[0].length == 3
    assert "data.args.length: the longest has 4,097 tokens" in refusal("text", file=str(path), packed=False)
    assert made("text", file=str(path), packed=False, val_fraction=1, length=7)[0].length == 7


def test_packed_text_keeps_the_order_of_lines(tmp_path) -> None:
    text = "".join(f"line {number} of the text, ä\n" for number in range(100))
    path = tmp_path / "corpus.txt"
    path.write_text(text, encoding="utf-8")
    info, samples = made("text", file=str(path), length=32, val_fraction=1.0)
    found = [real(samples[number])[0] for number in range(len(samples))]
    assert info.sizes == {"train": 0, "val": len(samples)}
    assert bytes(each for ids in found for each in ids).decode() == text
    assert {len(ids) for ids in found[:-1]} == {32}
    assert samples.file(1) == "corpus.txt:1"
    _, documents = made("text", file=str(path), packed=False, val_fraction=1.0)
    assert len(documents) == 100
    assert bytes(real(documents[7])[0]).decode() == "line 7 of the text, ä"
    assert documents.file(7) == "corpus.txt:8"
    _, cut = made("text", file=str(path), packed=False, length=6, val_fraction=1.0, labels=True)
    inputs, target = cut[3]
    assert bytes(inputs["input_ids"].tolist()) == b"line 3"
    assert inputs["labels"].equal(inputs["input_ids"])
    assert target.tolist() == [*inputs["input_ids"][1:].tolist(), IGNORED]
    train = made("text", "train", file=str(path), packed=False)[1]
    val = made("text", "val", file=str(path), packed=False)[1]  # type: ignore[arg-type]
    assert len(train) == 80
    assert len(val) == 20
    both = {part.file(n) for part in (train, val) for n in range(len(part))}
    assert len(both) == 100
    path.write_text("something else\n")  # the same file with other content is read again
    assert len(made("text", file=str(path), packed=False, val_fraction=1.0)[1]) == 1


def test_a_short_text_is_told_how_long_a_sample_is(tmp_path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("one\ntwo\n")
    said = refusal("text", "val", file=str(path))
    assert "128 tokens: data.args.length=N makes it shorter" in said
    assert "data.args.packed=false" in said
    path.write_text("one\n")
    assert "data.args.length" not in refusal("text", "val", file=str(path), packed=False)


def test_a_packed_sample_is_of_the_line_where_it_begins(tmp_path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "abcde"}\n\n{"text": "fg"}\n{"text": "hijk"}\n')
    _, packed = made("text", file=str(path), val_fraction=1.0, length=4)
    assert [bytes(real(packed[n])[0]) for n in range(len(packed))] == [b"abcd", b"e\nfg", b"\nhij", b"k\n"]
    assert [packed.file(n) for n in range(4)] == [f"corpus.jsonl:{line}" for line in (1, 1, 3, 4)]
    assert "has no field 'body'" in refusal("text", file=str(path), field="body")
