"""The token ids of texts in a `tokens` key, and the spans that samples have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pydantic import TypeAdapter
from torch import nn

from hookrun.engine.plan.texts import FoundTokenizer, decoder_of, texts_of, tokenizer_of, unknown_spans
from hookrun.engine.spec.tokens import Tokens, TokensClause


def clause(raw: Any) -> Tokens:
    return TypeAdapter[Tokens](TokensClause).validate_python(raw)


class Bytes:
    """A tokenizer of bytes."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()


class Odd:
    """A tokenizer that accepts some texts only, and adds special tokens unless told not to."""

    def encode(self, text: str, add_special_tokens: bool = True) -> Any:
        if text == "bad":
            raise KeyError("no such word")
        ids = [] if text == "none" else [len(text)]
        return SimpleNamespace(ids=[0, *ids] if add_special_tokens else ids)

    def decode(self, ids: list[int]) -> str:
        return {1: "a"}[ids[0]]


def test_texts_become_ids_without_special_tokens() -> None:
    found, problems = texts_of(clause({"text": ["ab", "é"]}), "hooks.h", FoundTokenizer(Bytes()))
    assert found == {"ab": ((97, 98),), "é": ((0xC3, 0xA9),)}
    assert problems == []
    assert texts_of(clause({"text": "abc"}), "hooks.h", FoundTokenizer(Odd()))[0] == {"abc": ((3,),)}


def test_texts_without_tokens_or_a_tokenizer_are_problems() -> None:
    _, (bad, none) = texts_of(clause({"text": ["bad", "none"]}), "hooks.h", FoundTokenizer(Odd()))
    assert bad.where == "hooks.h.tokens.text"
    assert "does not take 'bad': KeyError" in bad.what
    assert none.where == "hooks.h.tokens"
    assert none.what == "the tokenizer makes no token of 'none'"
    _, (missing,) = texts_of(clause({"text": "a"}), "task", FoundTokenizer(None))
    assert "`text` needs a tokenizer, and neither the data nor the model has one" in missing.what
    assert (
        texts_of(clause(-1), "task", FoundTokenizer(None))
        == texts_of(None, "task", FoundTokenizer(None))
        == ({}, [])
    )


def test_the_tokenizer_of_the_data_comes_before_the_model_s(tmp_path: Any) -> None:
    model = nn.Module()
    assert tokenizer_of(model, None).tokenizer is None
    model.tokenizer = Odd()  # type: ignore[assignment]
    data = Bytes()
    assert tokenizer_of(model, data).tokenizer is data
    assert tokenizer_of(model, "not one").tokenizer is model.tokenizer
    folder = nn.Module()
    folder.name_or_path = str(tmp_path)  # type: ignore[assignment]
    assert tokenizer_of(folder, None).why == "neither the data nor the model has one"


def test_an_unknown_id_has_no_text() -> None:
    decode = decoder_of(Odd())
    assert decode is not None
    assert decode(1) == "a"
    assert decode(2) == ""
    assert decoder_of(None) is None


def test_a_span_that_no_sample_has_is_reported_with_the_nearest() -> None:
    asked = clause({"span": "subjct"})

    def told(*spans: str) -> list[str]:
        data = SimpleNamespace(name="prompts", spans=spans, tokenizer=None, known_fields={})
        return [problem.what for problem in unknown_spans(asked, "hooks.h", data)]

    assert told("subject", "io") == ["the data 'prompts' has no span 'subjct'; did you mean 'subject'?"]
    assert "have no spans" in told()[0]
    assert told("subjct") == []
    assert list(unknown_spans(asked, "hooks.h", None)) == list(unknown_spans(None, "hooks.h", None)) == []
