"""Prompts with answers and spans, lines that are refused, and tokenizers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from token_samples import made, prompts, real, refusal

from hookrun.data.samples import IGNORED
from hookrun.data.tokenizer import Bytes, Words, tokenizer_named


def test_prompts_have_answers_with_spans_of_tokens(tmp_path: Path) -> None:
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
    assert info.spans == ("subject", "is")
    assert info.sizes == {"train": 0, "val": 2}
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
    assert targets == [*ids[1:], IGNORED]
    assert for_all.wrong(torch.tensor([0])) is None
    inputs, _ = made("prompts", file=file, labels=True)[1][0]
    assert bytes(inputs["labels"].tolist()) == b"CH"


def test_ambiguous_prompts_are_refused_with_their_line(tmp_path: Path) -> None:
    good = {"prompt": "a b a", "answer": "x", "wrong": "y", "spans": {"s": "b"}}
    for change, said in [
        ({"prompt": 3}, "'prompt' is a number, expected a text"),
        ({"prompt": ""}, "the prompt has no tokens"),
        ({"prompt": "\ud800"}, "half of a character"),
        ({"answer": None}, "'answer' is a null"),
        ({"answer": ""}, "'answer' has no tokens"),
        ({"wrong": "x2"}, "begin with the same token, 'x'"),
        ({"answer": " x", "wrong": " y"}, "a common space goes to the prompt's end"),
        ({"spans": {"s": "c"}}, "'c' is not in the prompt"),
        ({"spans": {"s": [1, 6]}}, "first < end <= 5"),
        ({"spans": {"s": [True, 2]}}, "expected a part of the text"),
        ({"spans": ["b"]}, "not a mapping"),
    ]:
        message = refusal("prompts", file=prompts(tmp_path, good, {**good, **change}))
        assert "line 2" in message, message
        assert said in message, message
    missing = {key: value for key, value in good.items() if key != "answer"}
    assert "line 2 has no field 'answer'" in refusal("prompts", file=prompts(tmp_path, good, missing))
    assert "lines before it do not have" in refusal("prompts", file=prompts(tmp_path, missing, good))
    assert "has no field 'question'" in refusal("prompts", file=prompts(tmp_path, good), prompt="question")
    assert "more tokens than 4" in refusal("prompts", file=prompts(tmp_path, good), length=4)
    assert "none of the 1 prompts" in refusal("prompts", "train", file=prompts(tmp_path, good))


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
    assert info.vocab_size == 8
    assert info.tokenizer is not None
    assert real(samples[0])[0] == [0, 7, 3, 4, 5]
    assert real(samples[0])[1][-1] == 6
    without_answer = made("prompts", file=file, tokenizer=folder, answer=None, wrong=None)[1]
    assert real(without_answer[0])[0] == [0, 7, 3, 4, 5, 1]
    assert samples.spans(torch.tensor([0]))["city"].tolist() == [[2, 3]]
    plain = made("prompts", file=file, tokenizer=folder, special_tokens=False)[1]
    assert real(plain[0])[0] == [7, 3, 4, 5]
    assert info.tokenizer.tokens([3, 6]) == ["Rome", "Italy"]
    (tmp_path / "t.jsonl").write_text('{"text": "Rome is old"}\n{"text": "is in"}')
    packed = made("text", file=str(tmp_path / "t.jsonl"), tokenizer=folder, val_fraction=1.0)[1]
    assert real(packed[0])[0] == [3, 4, 7, 1, 4, 5, 1]


def test_bytes_say_which_character_they_belong_to() -> None:
    encoded = tokenizer_named("bytes").encode("aé")
    assert list(encoded.ids) == [0x61, 0xC3, 0xA9]
    assert list(encoded.offsets) == [(0, 1), (1, 2), (1, 2)]
    assert Bytes().decode(encoded.ids) == "aé"
    assert Bytes().tokens(encoded.ids) == ["a", "\\xc3", "\\xa9"]


def test_an_unknown_word_is_named() -> None:
    words = Words(("to", "the", "store"))
    encoded = words.encode("to  store")
    assert list(encoded.ids) == [0, 2]
    assert list(encoded.offsets) == [(0, 2), (4, 9)]
    assert words.decode([1, 2]) == "the store"
    with pytest.raises(ValueError, match="'stor' is not one of the 3 words; did you mean 'store'"):
        words.encode("the stor")
