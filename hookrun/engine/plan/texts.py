"""The token ids of the texts in a `tokens` key, by the model's tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import nn

from hookrun.engine.spec.tokens import Tokens
from hookrun.engine.spec.when import MOST_CHARACTERS, MOST_FIELDS, Scalar, Wanted, text_of, typed
from hookrun.engine.validation import parameters
from hookrun.errors import Problem, nearest, reason, shown

Tokenizer = Any
"""An object with `encode` and `decode`, such as a tokenizer of transformers, of tokenizers or of hookrun's data."""


class DescribedData(Protocol):
    """What is known of the samples before a run."""

    @property
    def name(self) -> str:
        """The name of the data set."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of samples of tokens; None for other samples."""

    @property
    def spans(self) -> tuple[str, ...]:
        """The names of the spans that samples may have."""

    @property
    def known_fields(self) -> Mapping[str, Collection[tuple[bool, Scalar]] | None]:
        """The name of every field of a sample -> its values, as `typed` has them; None: not all are known."""


class FoundTokenizer(NamedTuple):
    """The tokenizer for a model's tokens.

    tokenizer: None if there is no usable one
    why:       the reason, if there is none
    """

    tokenizer: Tokenizer | None
    why: str = "neither the data nor the model has one"


def tokenizer_of(model: nn.Module, of_data: Tokenizer | None) -> FoundTokenizer:
    """The tokenizer of the data, else the model's attribute `tokenizer`, else that of the folder of the model."""
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
    """A function token id -> text, "" if the tokenizer does not know the id; None without a tokenizer.

    A model may have more tokens than its tokenizer, such as a start token of answers or padding rows of its embedding.
    """
    if tokenizer is None:
        return None

    @lru_cache(maxsize=100_000)
    def decode(token: int) -> str:
        try:
            return str(tokenizer.decode([token]))
        except Exception:  # another library's tokenizer may raise anything, and the text is only for display
            return ""

    return decode


Ids = tuple[int, ...]


def texts_of(
    clause: Tokens | None, owner: str, found_tokenizer: FoundTokenizer
) -> tuple[dict[str, tuple[Ids, ...]], list[Problem]]:
    """Text -> the ways in which it may be tokens, of every text in the clause, and problems of texts without tokens.

    owner: the key path of the hook or task with the clause
    """
    ids: dict[str, tuple[Ids, ...]] = {}
    texts = [text for part in clause.filters for text in part.texts] if clause is not None else []
    if not texts:
        return ids, []
    where = f"{owner}.tokens"
    if found_tokenizer.tokenizer is None:
        what = f"`text` needs a tokenizer, and {found_tokenizer.why}"
        return ids, [Problem(where, what, "name the tokens by number: {id: […]}, or set model.tokenizer")]
    encode = _encoder(found_tokenizer.tokenizer)
    problems: list[Problem] = []
    for text in texts:
        try:
            ids[text] = _ways(encode, text)
        except Exception as error:  # a tokenizer that is not ours may raise anything
            what = f"the tokenizer does not take {shown(text)}: {reason(error)}"
            hint = "write it as the data does, or name tokens by number: id"
            problems.append(Problem(f"{where}.text", what, hint))
            continue
        if not all(ids[text]):
            problems.append(Problem(where, f"the tokenizer makes no token of {text!r}"))
    return ids, problems


def _encoder(tokenizer: Tokenizer) -> Callable[[str], Ids]:
    """A function text -> token ids, without those that a tokenizer puts around every sequence."""
    special = "special" if "special" in (parameters(tokenizer.encode) or {}) else "add_special_tokens"

    def encode(text: str) -> Ids:
        encoded = tokenizer.encode(text, **{special: False})
        return tuple(getattr(encoded, "ids", encoded))

    return encode


def _ways(encode: Callable[[str], Ids], text: str) -> tuple[Ids, ...]:
    """The tokens of a text at the start of a text, and those behind a bracket with which it shares no token."""
    ways = {encode(text)}
    with suppress(Exception):  # a tokenizer that is not ours may raise anything
        bracket = encode("(")
        both = encode("(" + text)
        if both[: len(bracket)] == bracket and len(both) > len(bracket):
            ways.add(both[len(bracket) :])
    return tuple(ways)


def unknown_spans(clause: Tokens | None, owner: str, data: DescribedData | None) -> Iterator[Problem]:
    """Problems of spans in the clause that no sample has. data: None if the data is not known."""
    if clause is None or data is None:
        return
    where = f"{owner}.tokens.span"
    named = [name for part in clause.filters for name in part.spans]
    for name in dict.fromkeys(named):
        if not data.spans:
            yield Problem(
                where,
                f"there is no span {name!r}: the samples of the data '{data.name}' have no spans",
                "name tokens by position, id or text, or give the samples of data=prompts spans",
            )
        elif name not in data.spans:
            near = nearest(name, [span[:80] for span in data.spans])
            yield Problem(where, f"the data '{data.name}' has no span {name!r}; {near}")


def unknown_fields(wanted: Wanted, where: str, data: DescribedData) -> Iterator[Problem]:
    """Problems of fields that the data does not have, and of values that none of its samples has."""
    fields = data.known_fields
    for field, values in wanted.items():
        if field not in fields:
            yield Problem(
                f"{where}.{field}",
                f"the data '{data.name}' has no field {field!r}; {nearest(field, fields)}",
                "own fields are those of a .jsonl file that is not packed: numbers, booleans and texts, of at most "
                f"{MOST_FIELDS} names, name and value of at most {MOST_CHARACTERS} characters",
            )
            continue
        present = fields[field]
        for value in values:
            text = text_of(value)
            what = ""
            if present is not None and typed(value) not in present:
                near = nearest(text, (text_of(other) for _, other in present))
                what = f"no sample of the data '{data.name}' has the value {text}; {near}"
            elif present is None and data.tokenizer is None:  # data of tokens has own fields, of any type
                what = _wrong_type(field, value)
            if what:
                yield Problem(f"{where}.{field}", what)


def _wrong_type(field: str, value: Scalar) -> str:
    """What is wrong with a value of a field whose values are not known before the run; empty if nothing is."""
    if field in ("class", "file") and type(value) is not str:
        needed = "the names of files are texts"
        if field == "class":
            needed = "the names of classes are texts; `label` is the number"
    elif field == "sample" and type(value) is not int:
        needed = "samples are numbered"
    else:
        return ""
    return f"found {text_of(value)}, and no sample has it: {needed}"
