"""From text to token ids and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from token_samples import made, prompts, real

from hookrun.data.tokenizer import Bytes, Words, tokenizer_named


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


def test_bytes_are_utf_8_and_say_which_character_each_is_of() -> None:
    encoded = tokenizer_named("bytes").encode("aé")
    assert list(encoded.ids) == [0x61, 0xC3, 0xA9] and list(encoded.offsets) == [(0, 1), (1, 2), (1, 2)]
    assert Bytes().decode(encoded.ids) == "aé"
    assert Bytes().tokens(encoded.ids) == ["a", "\\xc3", "\\xa9"]


def test_words_are_separated_by_spaces_and_an_unknown_one_is_named() -> None:
    words = Words(("to", "the", "store"))
    encoded = words.encode("to  store")
    assert (list(encoded.ids), list(encoded.offsets)) == ([0, 2], [(0, 2), (4, 9)])
    assert words.decode([1, 2]) == "the store"
    with pytest.raises(ValueError, match="'stor' is not one of the 3 words; did you mean 'store'"):
        words.encode("the stor")
