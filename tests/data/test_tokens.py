"""Data of tokens: padding and masks, targets, spans, text and prompts from files, and files that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hookrun.data import DataInfo, Split, describe, load
from hookrun.data.samples import IGNORED, Samples
from hookrun.data.text_files import MOST_LINE
from hookrun.errors import SpecError
from hookrun.spec.experiment import Data

GENERATED = ("repeated_tokens", "modular_addition", "names")


def made(name: str, split: Split = "val", **args: Any) -> tuple[DataInfo, Samples]:
    config = Data(name=name, args=args)
    return describe(config, split), load(config, split, seed=0)


def refusal(name: str, split: Split = "val", **args: Any) -> str:
    with pytest.raises(SpecError) as error:
        made(name, split, **args)
    return str(error.value)


def real(sample: Any) -> tuple[list[int], list[int]]:
    """The token ids of a sample without its padding, and the targets at them."""
    inputs, target = sample
    kept = inputs["attention_mask"].bool()
    assert (target[~kept] == IGNORED).all()
    return inputs["input_ids"][kept].tolist(), target[kept].tolist()


def prompts(tmp_path: Path, *lines: object) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines))
    return str(path)


@pytest.mark.parametrize("name", GENERATED)
def test_samples_are_as_described_and_the_same_on_either_side_of_the_padding(name: str) -> None:
    small = {} if name == "modular_addition" else {"val_size": 20}
    info, right = made(name, **small)
    left_info, left = made(name, padding="left", **small)
    assert left_info.inputs.keys() - info.inputs.keys() == {"position_ids"}
    assert info.vocab_size is not None and info.tokenizer is not None
    for number in range(20):
        inputs, target = right[number]
        assert {key: tuple(each.shape) for key, each in inputs.items()} == {
            key: each.shape for key, each in info.inputs.items()
        }
        ids, targets = real((inputs, target))
        assert real(left[number]) == (ids, targets) == real(right[number])
        assert max(ids) < info.vocab_size and max(targets) >= 0
        there = left[number][0]
        assert there["position_ids"][there["attention_mask"].bool()].tolist() == list(range(len(ids)))
        assert int(there["attention_mask"][-1]) == 1 == int(inputs["attention_mask"][0])
    numbers = torch.arange(20)
    assert all(each.shape == (20, 2) for each in right.spans(numbers).values())
    assert set(right.spans(numbers)) == set(info.spans)
    with pytest.raises(IndexError):
        right[len(right)]


def test_repeated_tokens_are_repeated_and_what_follows_is_certain() -> None:
    _, samples = made("repeated_tokens", half=[2, 9], vocab_size=12, val_size=50)
    spans = samples.spans(torch.arange(50))
    lengths = set()
    for number in range(50):
        ids, targets = real(samples[number])
        first, second = (ids[slice(*spans[name][number].tolist())] for name in ("first", "second"))
        assert first == second and [0, *first, *second] == ids and len(set(first)) == len(first)
        assert targets[len(first) + 1 : -1] == second[1:]
        assert set(targets[: len(first) + 1]) | {targets[-1]} == {IGNORED}
        lengths.add(len(first))
    assert lengths == set(range(2, 10))
    assert "9 different tokens do not fit" in refusal("repeated_tokens", half=[2, 9], vocab_size=9)
    _, every = made("repeated_tokens", predict="all", half=[3, 3])
    ids, targets = real(every[0])
    assert targets == [*ids[1:], IGNORED]


def test_modular_addition_has_every_pair_once_with_its_sum() -> None:
    seen = []
    for split in ("train", "val"):
        _, samples = made("modular_addition", split, modulus=7)  # type: ignore[arg-type]
        for number in range(len(samples)):
            (a, plus, b, equals), targets = real(samples[number])
            assert (plus, equals) == (7, 8) and targets == [IGNORED] * 3 + [(a + b) % 7]
            seen.append((a, b))
    assert sorted(seen) == [(a, b) for a in range(7) for b in range(7)]


def test_names_have_their_answer_their_spans_and_the_same_length_in_every_form() -> None:
    sets = {form: made("names", form=form, val_size=40) for form in ("clean", "swapped", "other")}
    info, clean = sets["clean"]
    numbers = torch.arange(40)
    spans, wrong = clean.spans(numbers), clean.wrong(numbers)
    assert info.tokenizer is not None and wrong is not None
    for number in range(40):
        ids, targets = real(clean[number])
        io, subject, again = (ids[int(spans[name][number, 0])] for name in ("io", "subject", "subject2"))
        assert targets[-1] == io != subject == again == wrong[number]
        swapped, other = (real(sets[form][1][number]) for form in ("swapped", "other"))
        assert swapped[1] == targets == other[1]
        assert swapped[0][int(spans["subject2"][number, 0])] == io and not {io, subject} & set(other[0])
        assert sum(a != b for a, b in zip(ids, swapped[0], strict=True)) == 1
    text = info.tokenizer.decode(real(clean[0])[0])
    assert text.endswith(" to") and list(info.tokenizer.encode(text).ids) == real(clean[0])[0]


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
    path.write_text("something else\n")  # the same file with other content is read anew
    assert len(made("text", file=str(path), packed=False, val_fraction=1.0)[1]) == 1


def test_jsonl_text_keeps_documents_apart(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "two"}\n')
    _, packed = made("text", file=str(path), val_fraction=1.0)
    assert bytes(real(packed[0])[0]) == b"one\ntwo\n"
    assert "has no field 'body'" in refusal("text", file=str(path), field="body")


def test_prompts_have_answers_wrong_ones_and_spans_at_their_tokens(tmp_path: Path) -> None:
    file = prompts(
        tmp_path,
        {
            "prompt": "Zürich is in",
            "answer": "CH",
            "wrong": "IT",
            "spans": {"subject": "Zürich", "is": [8, 10]},
        },
        "",
        {"prompt": "Rome lies in", "answer": "IT", "wrong": "CH", "spans": {"subject": "Rome"}},
    )
    info, samples = made("prompts", file=file)
    assert info.spans == ("subject", "is") and info.sizes == {"train": 0, "val": 2}
    spans = samples.spans(torch.tensor([1, 0]))
    assert spans["subject"].tolist() == [[0, 4], [0, 7]]  # ü is two bytes
    assert spans["is"].tolist() == [[-1, -1], [8, 10]]
    assert bytes(real(samples[0])[0][0:7]).decode() == "Zürich"
    assert real(samples[0])[1] == [IGNORED] * 12 + [ord("C")]
    assert samples.wrong(torch.tensor([1, 0])).tolist() == [ord("C"), ord("I")]  # type: ignore[union-attr]
    assert samples.file(1) == "prompts.jsonl:3"
    for_all = made("prompts", file=file, spans={"place": "in"}, answer=None, wrong=None)[1]
    assert for_all.spans(torch.tensor([1]))["place"].tolist() == [[10, 12]]
    ids, targets = real(for_all[0])
    assert targets == [*ids[1:], IGNORED] and for_all.wrong(torch.tensor([0])) is None
    inputs, _ = made("prompts", file=file, labels=True)[1][0]
    assert bytes(inputs["labels"].tolist()) == b"CH"


def test_prompts_that_are_not_clear_are_refused_with_their_line(tmp_path: Path) -> None:
    good = {"prompt": "a b a", "answer": "x", "wrong": "y", "spans": {"s": "b"}}
    for change, said in [
        ({"prompt": 3}, "'prompt' is a number, expected a text"),
        ({"prompt": ""}, "the prompt has no tokens"),
        ({"prompt": "\ud800"}, "half of a character"),
        ({"answer": None}, "'answer' is a null"),
        ({"answer": ""}, "'answer' has no tokens"),
        ({"wrong": "x2"}, "begin with the same token, 'x'"),
        ({"spans": {"s": "c"}}, "'c' is not in the prompt"),
        ({"spans": {"s": "a"}}, "more than once"),
        ({"spans": {"s": [1, 6]}}, "first < end <= 5"),
        ({"spans": {"s": [True, 2]}}, "expected a part of the text"),
        ({"spans": ["b"]}, "not a mapping"),
    ]:
        message = refusal("prompts", file=prompts(tmp_path, good, {**good, **change}))
        assert "line 2" in message and said in message, message
    missing = {key: value for key, value in good.items() if key != "answer"}
    assert "line 2 has no field 'answer'" in refusal("prompts", file=prompts(tmp_path, good, missing))
    assert "lines before it do not have" in refusal("prompts", file=prompts(tmp_path, missing, good))
    assert "has no field 'question'" in refusal("prompts", file=prompts(tmp_path, good), prompt="question")
    assert "more tokens than 4" in refusal("prompts", file=prompts(tmp_path, good), length=4)
    assert "none of the 1 prompts" in refusal("prompts", "train", file=prompts(tmp_path, good))


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


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A tokenizer of words with a token that begins and one that ends every text."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {
        word: number for number, word in enumerate(["<s>", "</s>", "?", "Rome", "is", "in", "Italy", "old"])
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="?"
    )
    made.save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def test_a_tokenizer_of_transformers_counts_its_special_tokens(folder: str, tmp_path: Path) -> None:
    file = prompts(
        tmp_path,
        {"prompt": "old Rome is in", "answer": " Italy", "wrong": " Rome", "spans": {"city": "Rome"}},
    )
    info, samples = made("prompts", file=file, tokenizer=folder)
    assert info.vocab_size == 8 and info.tokenizer is not None
    assert real(samples[0])[0] == [0, 7, 3, 4, 5, 1] and real(samples[0])[1][-1] == 6
    assert samples.spans(torch.tensor([0]))["city"].tolist() == [[2, 3]]
    plain = made("prompts", file=file, tokenizer=folder, special_tokens=False)[1]
    assert real(plain[0])[0] == [7, 3, 4, 5]
    assert info.tokenizer.tokens([3, 6]) == ["Rome", "Italy"]
    (tmp_path / "t.jsonl").write_text('{"text": "Rome is old"}\n{"text": "is in"}')
    packed = made("text", file=str(tmp_path / "t.jsonl"), tokenizer=folder, val_fraction=1.0)[1]
    assert real(packed[0])[0] == [3, 4, 7, 1, 4, 5, 1]
