"""The tokens that the texts of a `tokens` clause stand for, by the model's tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from hookrun.arguments import parameters
from hookrun.data.info import DataInfo
from hookrun.errors import Problem, nearest, reason, shown
from hookrun.spec.hook import HookSpec
from hookrun.spec.tokens import Tokens

Tokenizer = Any
"""Has `encode` and `decode`, as those of transformers, of tokenizers and of hookrun's own data have."""


class FoundTokenizer(NamedTuple):
    """The tokenizer for a model's tokens.

    tokenizer: None: there is none that can be used
    why:       in words, where there is none
    """

    tokenizer: Tokenizer | None
    why: str = "neither the data nor the model has one"


def tokenizer_of(model: nn.Module, of_data: Tokenizer | None) -> FoundTokenizer:
    """That of the data; else the model's attribute `tokenizer`, or the one in the folder that it was read from."""
    for given in (of_data, getattr(model, "tokenizer", None)):
        if callable(getattr(given, "encode", None)) and callable(getattr(given, "decode", None)):
            return FoundTokenizer(given)
    folder = getattr(model, "name_or_path", None)
    if not isinstance(folder, str) or not folder or not (Path(folder) / "tokenizer_config.json").is_file():
        return FoundTokenizer(None)
    try:
        return FoundTokenizer(_of_folder(folder))
    except Exception as error:  # a damaged or unknown tokenizer may raise anything
        return FoundTokenizer(None, f"the one in {folder} cannot be read: {reason(error)}")


@lru_cache(maxsize=4)
def _of_folder(folder: str) -> Tokenizer:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def decoder_of(tokenizer: Tokenizer | None) -> Callable[[int], str] | None:
    """A token -> its text, "" where the tokenizer does not know it; None without a tokenizer.

    A model may have more tokens than its tokenizer: one that begins every answer, or rows that fill up its embedding.
    """
    if tokenizer is None:
        return None

    @lru_cache(maxsize=100_000)
    def decode(token: int) -> str:
        try:
            return str(tokenizer.decode([token]))
        except (
            Exception
        ):  # a tokenizer that is not ours may raise anything, and the text is only for the reader
            return ""

    return decode


def texts_of(
    spec: HookSpec, found_tokenizer: FoundTokenizer
) -> tuple[dict[str, tuple[int, ...]], list[Problem]]:
    """Text -> tokens of every text in the clause, and why some have none."""
    return texts_of_clause(spec.keys.tokens, f"{spec.where}.tokens", found_tokenizer)


def texts_of_clause(
    clause: Tokens | None, where: str, found_tokenizer: FoundTokenizer
) -> tuple[dict[str, tuple[int, ...]], list[Problem]]:
    """The same for the clause at the key path `where`."""
    found, problems = dict[str, tuple[int, ...]](), list[Problem]()
    texts = [text for each in clause.filters for text in each.texts] if clause is not None else []
    if not texts:
        return found, problems
    tokenizer = found_tokenizer.tokenizer
    if tokenizer is None:
        what = f"`text` needs a tokenizer, and {found_tokenizer.why}"
        return found, [Problem(where, what, "name the tokens by number: {id: […]}, or set model.tokenizer")]
    for text in texts:
        try:
            found[text] = _encoded(tokenizer, text)
        except Exception as error:  # a tokenizer that is not ours may raise anything
            what = f"the tokenizer does not take {shown(text)}: {reason(error)}"
            problems.append(
                Problem(f"{where}.text", what, "write it as the data does, or name tokens by number: id")
            )
            continue
        if not found[text]:
            problems.append(Problem(where, f"the tokenizer makes no token of {text!r}"))
    return found, problems


def unknown_spans(spec: HookSpec, data: DataInfo | None) -> Iterator[Problem]:
    """The spans in the clause that no sample of the data has; None: the data is not known."""
    yield from unknown_spans_of_clause(spec.keys.tokens, f"{spec.where}.tokens", data)


def unknown_spans_of_clause(clause: Tokens | None, at: str, data: DataInfo | None) -> Iterator[Problem]:
    """The same for the clause at the key path `at`."""
    if clause is None or data is None:
        return
    where = f"{at}.span"
    for name in dict.fromkeys(name for each in clause.filters for name in each.spans):
        if not data.spans:
            what = f"there is no span {name!r}: the samples of the data '{data.name}' have no spans"
            yield Problem(
                where, what, "name tokens by position, id or text, or give the samples of data=prompts spans"
            )
        elif name not in data.spans:
            what = f"the data '{data.name}' has no span {name!r}; {nearest(name, [each[:80] for each in data.spans])}"
            yield Problem(where, what)


def _encoded(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """The tokens of a text, without those that stand around every sequence."""
    names = parameters(tokenizer.encode) or {}
    plain = {"special": False} if "special" in names else {"add_special_tokens": False}
    found = tokenizer.encode(text, **plain)
    return tuple(getattr(found, "ids", found))
