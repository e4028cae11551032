"""Tokenizers in a folder of transformers: data from a stranger, which makes no text much longer and fails in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hookrun.data.tokenizer import growth_of, tokenizer_named
from hookrun.errors import HookrunError, SpecError

pytest.importorskip("transformers")


def replacing(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(*steps: dict[str, Any], key: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", key: list(steps)}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
DOUBLED = sequence(*[replacing("a", "aa")] * 30)
ADDED = {
    "id": 3, "content": "aaaa", "single_word": False, "lstrip": False, "rstrip": False, "normalized": True,
    "special": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": DOUBLED},
        {"normalizer": sequence(DOUBLED, DOUBLED)},
        {"normalizer": DOUBLED, "added_tokens": [ADDED]},
        {"normalizer": sequence(*[replacing("", "x" * 200, "Regex")] * 3)},
        {"normalizer": sequence(*[{"type": "ByteLevel"}] * 30)},
        {"normalizer": sequence(*[{"type": "Prepend", "prepend": "x" * 100}] * 3)},
        {"pre_tokenizer": sequence(*[BYTES] * 30, key="pretokenizers")},
        {"decoder": sequence(*[replacing("a", "aa")] * 30, key="decoders")},
    ],
)
def test_a_tokenizer_that_multiplies_a_text_is_refused(tmp_path: Path, parts: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"tokenizer\.json may make a text more than 8,192 times as long"):
        tokenizer_named(folder(tmp_path, **parts))


def test_a_long_text_is_refused_where_it_could_become_too_long(tmp_path: Path) -> None:
    tokenizer = tokenizer_named(folder(tmp_path, normalizer=replacing("a", "a" * 4096)))
    assert len(tokenizer.encode("b").ids) == 1
    with pytest.raises(ValueError, match="break it into lines"):
        tokenizer.encode("a" * 2**20)


def test_usual_tokenizers_make_a_text_a_little_longer(tmp_path: Path) -> None:
    llama = sequence({"type": "Prepend", "prepend": "▁"}, replacing(" ", "▁"))
    albert = sequence(
        replacing("``", '"'),
        {"type": "NFKD"},
        {"type": "StripAccents"},
        {"type": "Lowercase"},
        replacing(" {2,}", " ", "Regex"),
    )
    for normalizer, most in ((llama, 12), (albert, 33), (None, 1)):
        assert growth_of(Path(folder(tmp_path, normalizer=normalizer)) / "tokenizer.json") == most


def test_an_expression_that_backtracks_without_end_is_an_error(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+(?!a)$b"}, "behavior": "Isolated", "invert": False}
    tokenizer = tokenizer_named(folder(tmp_path, pre_tokenizer=split))
    with pytest.raises(HookrunError, match="the tokenizer failed: PanicException"):
        tokenizer.encode("a" * 5000 + "b")


BACKTRACKS = {"type": "Split", "pattern": {"Regex": "(a+)+(?!a)$b"}, "behavior": "Isolated", "invert": False}


def test_an_expression_that_backtracks_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_named(folder(tmp_path, pre_tokenizer=BACKTRACKS))
    with pytest.raises(ValueError, match=r"22 characters took .* s: an expression in the tokenizer's file"):
        for _ in range(3000):
            tokenizer.encode("a" * 21 + "b")


def test_the_start_of_a_long_text_is_judged_first(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("hookrun.data.tokenizer.TRIAL", 44)
    monkeypatch.setattr("hookrun.data.tokenizer.SECONDS", 0)
    tokenizer = tokenizer_named(folder(tmp_path, pre_tokenizer=BACKTRACKS))
    with pytest.raises(ValueError, match="44 characters took"):
        tokenizer.encode(("a" * 21 + "b") * 3000)


def test_a_usual_expression_takes_less_than_its_time(tmp_path: Path) -> None:
    gpt2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = tokenizer_named(folder(tmp_path, pre_tokenizer=gpt2))
    for text in ("a b?" * 20_000, *["a b"] * 200):
        assert tokenizer.encode(text).ids


def folder(path: Path, **parts: Any) -> str:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    content = json.loads(Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")).to_str())
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(content | parts))
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return str(path)
