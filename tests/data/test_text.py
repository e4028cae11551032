"""A user's own text, packed or document by document."""

from __future__ import annotations

from pathlib import Path

from token_samples import made, real, refusal

from hookrun.data.samples import IGNORED


def test_packed_text_is_all_of_it_in_order_and_documents_are_lines(tmp_path: Path) -> None:
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
    assert len(documents) == 100 and bytes(real(documents[7])[0]).decode() == "line 7 of the text, ä"
    assert documents.file(7) == "corpus.txt:8"
    _, cut = made("text", file=str(path), packed=False, length=6, val_fraction=1.0, labels=True)
    inputs, target = cut[3]
    assert bytes(inputs["input_ids"].tolist()) == b"line 3" and inputs["labels"].equal(inputs["input_ids"])
    assert target.tolist() == [*inputs["input_ids"][1:].tolist(), IGNORED]
    train, val = (made("text", split, file=str(path), packed=False)[1] for split in ("train", "val"))  # type: ignore[arg-type]
    assert (len(train), len(val)) == (80, 20)
    both = {part.file(n) for part in (train, val) for n in range(len(part))}
    assert len(both) == 100
    path.write_text("something else\n")  # the same file with other content is read again
    assert len(made("text", file=str(path), packed=False, val_fraction=1.0)[1]) == 1


def test_a_text_too_short_for_two_samples_is_told_how_long_a_sample_is(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("one\ntwo\n")
    said = refusal("text", "val", file=str(path))
    assert (
        "a sample is 128 tokens: data.args.length=N makes it shorter" in said
        and "data.args.packed=false" in said
    )
    path.write_text("one\n")
    assert "data.args.length" not in refusal("text", "val", file=str(path), packed=False)


def test_jsonl_text_keeps_documents_apart(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "two"}\n')
    _, packed = made("text", file=str(path), val_fraction=1.0)
    assert bytes(real(packed[0])[0]) == b"one\ntwo\n"
    assert "has no field 'body'" in refusal("text", file=str(path), field="body")


def test_a_packed_sample_is_of_the_line_where_it_begins(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "abcde"}\n\n{"text": "fg"}\n{"text": "hijk"}\n')
    _, packed = made("text", file=str(path), val_fraction=1.0, length=4)
    assert [bytes(real(packed[n])[0]) for n in range(len(packed))] == [b"abcd", b"e\nfg", b"\nhij", b"k\n"]
    assert [packed.file(n) for n in range(4)] == [f"corpus.jsonl:{line}" for line in (1, 1, 3, 4)]
