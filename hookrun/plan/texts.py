"""The tokens that the texts of a `tokens` clause stand for, by the model's tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, cast

from torch import nn

from hookrun.errors import Problem
from hookrun.spec.hook import HookSpec


class Tokenizer(Protocol):
    """What is asked of a tokenizer; those of transformers are such."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...


def tokenizer_of(model: nn.Module) -> Tokenizer | None:
    """The attribute `tokenizer` of the model; else the one in the folder that a transformers model was read from."""
    given = getattr(model, "tokenizer", None)
    if callable(getattr(given, "encode", None)) and callable(getattr(given, "decode", None)):
        return cast(Tokenizer, given)
    folder = getattr(model, "name_or_path", None)
    if isinstance(folder, str) and folder and (Path(folder) / "tokenizer_config.json").is_file():
        return cast(Tokenizer, _of_folder(folder))
    return None


@lru_cache(maxsize=4)
def _of_folder(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def decoder_of(model: nn.Module) -> Callable[[int], str] | None:
    """A token -> its text; None without a tokenizer."""
    tokenizer = tokenizer_of(model)
    if tokenizer is None:
        return None
    return lru_cache(maxsize=100_000)(lambda token: tokenizer.decode([token]))


def texts_of(spec: HookSpec, model: nn.Module) -> tuple[dict[str, tuple[int, ...]], list[Problem]]:
    """Text -> tokens of every text in the clause, and why some have none."""
    clause, found, problems = spec.keys.tokens, dict[str, tuple[int, ...]](), list[Problem]()
    texts = [text for each in clause.filters for text in each.texts] if clause is not None else []
    if not texts:
        return found, problems
    tokenizer, where = tokenizer_of(model), f"{spec.where}.tokens"
    if tokenizer is None:
        hint = "name the tokens by their numbers, tokens: {id: […]}, or set model.tokenizer"
        return found, [
            Problem(where, "`text` needs a tokenizer, and neither the model nor its folder has one", hint)
        ]
    for text in texts:
        found[text] = tuple(tokenizer.encode(text, add_special_tokens=False))
        if not found[text]:
            problems.append(Problem(where, f"the tokenizer makes no token of {text!r}"))
    return found, problems
