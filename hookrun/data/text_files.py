"""Text and JSON Lines from untrusted files, read within limits; errors name the line."""

from __future__ import annotations

import json
from abc import abstractmethod
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from hookrun.data.info import SPLITS, DataInfo, Split
from hookrun.data.samples import IGNORED, Samples
from hookrun.data.source import Source
from hookrun.data.tokenizer import BYTES, WHERE, Encoded, Tokenizer
from hookrun.data.tokens import PaddingArgs, TokenLayout, TokenSamples, TokenSequence, next_tokens
from hookrun.engine.spec.when import MOST_CHARACTERS, MOST_FIELDS, typed
from hookrun.errors import SpecError, nearest, reason, refused_at, spec_error

MOST_LINE = 2**20
"""Bytes of one line."""
MOST_LINES = 2_000_000
_JSON_LINES = "write one JSON object on each line"


def lines(path: Path, where: str) -> Iterator[tuple[int, str]]:
    """Number, from 1, and text of each line, with its end. Raises SpecError for lines not in UTF-8 or too long."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MOST_LINE + 1):
            number += 1
            if len(raw) > MOST_LINE:
                what = f"{path} line {number} has more than {MOST_LINE:,} bytes"
                raise spec_error(where, what, "shorten it, or break it into lines")
            if number > MOST_LINES:
                raise spec_error(where, f"{path} has more than {MOST_LINES:,} lines", "give a part of it")
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                what = f"{path} line {number} is not UTF-8: {error.reason} at byte {error.start}"
                raise spec_error(where, what, "save the file in UTF-8") from error


def records(path: Path, where: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of each line of a .jsonl file that is not blank. Raises SpecError."""
    for number, line in lines(path, where):
        if not line.strip():
            continue
        what = f"{path} line {number} is not JSON: "
        with refused_at(where, _JSON_LINES, kinds=(ValueError, RecursionError), what=what, tell=reason):
            record = json.loads(line)
        if not isinstance(record, dict):
            what = f"{path} line {number} is a JSON {_kind(record)}, expected an object with named fields"
            raise spec_error(where, what, _JSON_LINES)
        yield number, record


def text_field(record: dict[str, Any], name: str, at: str, key: str) -> str:
    """The text in a field. Raises SpecError, at the key that names the field, where it is missing or something else.

    at: file and line
    """
    if name not in record:
        near = nearest(name, [each[:80] for each in record])
        raise spec_error(key, f"{at} has no field '{name}'; {near}", f"name the field in {key}")
    value = record[name]
    if not isinstance(value, str):
        raise spec_error(key, f"{at}: the field '{name}' is a {_kind(value)}, expected a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON may hold one half of a surrogate pair
        what = f"{at}: the field '{name}' holds half of a character (a lone surrogate)"
        raise spec_error(key, what) from error
    return value


_MOST_VALUES = 1000


def own_fields(record: Mapping[str, Any], text: str, names: set[str]) -> str:
    """The fields of a record that are texts, numbers or booleans, as a JSON object.

    text:  the field of the text itself, which is left out
    names: of the fields of the file so far; a new one is added, and left out if there are many
    """
    kept: dict[str, str | int | float] = {}
    for name, value in record.items():
        if name == text or not isinstance(value, str | int | float):
            continue
        if len(name + str(value)) <= MOST_CHARACTERS and (name in names or len(names) < MOST_FIELDS):
            names.add(name)
            kept[name] = value
    return json.dumps(kept)


@lru_cache(maxsize=2)  # as the files: a data set is described before it is loaded
def values_of_fields(records: tuple[str, ...]) -> Mapping[str, set[tuple[bool, Any]] | None]:
    """Name -> the different values in results of `own_fields`, as `typed` has them; None if there are many."""
    values: dict[str, set[tuple[bool, Any]]] = {}
    for record in set(records):
        for name, value in json.loads(record).items():
            if len(of_field := values.setdefault(name, set())) <= _MOST_VALUES:
                of_field.add(typed(value))
    return {name: None if len(those) > _MOST_VALUES else those for name, those in values.items()}


def _kind(value: Any) -> str:
    names = {dict: "object", list: "list", str: "text", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


MOST_TOKENS = 2**28
LONGEST = 4096
"""The largest length to which sequences are padded if no length is given."""


def encode(
    tokenizer: Tokenizer, text: str, at: str, *, special: bool = False, offsets: bool = False
) -> Encoded:
    """The tokens of a text; see `Tokenizer.encode`. Raises SpecError, which names the place `at`."""
    what = f"{at} cannot be tokenized: "
    # a tokenizer of a folder may raise anything
    with refused_at(WHERE, kinds=Exception, what=what, tell=reason):
        return tokenizer.encode(text, special=special, offsets=offsets)


def require_few_tokens(count: int, where: str) -> None:
    """Raises SpecError, at the key `where`, if this is more than a file may have."""
    if count > MOST_TOKENS:
        raise spec_error(where, f"the file has more than {MOST_TOKENS:,} tokens", "give a part of it")


def padded_length(longest: int, key: str) -> int:
    """The length of samples without a given one: that of the longest. Raises SpecError if that is too long."""
    if longest > LONGEST:
        raise spec_error(
            key,
            f"the longest has {longest:,} tokens, and the others would be padded to that",
            f"set {key}: the most tokens of a sample",
        )
    return max(longest, 1)


@dataclass(frozen=True, slots=True)
class FileSample:
    """A sample of a file of text.

    place:         file and line where it begins: ``corpus.txt:17``
    ids:           its tokens
    answer, wrong: the tokens of the right and the wrong answer; empty where there is none
    spans:         name -> first position and end
    fields:        its own fields as a JSON object, which takes less memory than a dict
    told:          lines about how its texts became tokens
    """

    place: str
    ids: array[int]
    answer: Sequence[int] = ()
    wrong: Sequence[int] = ()
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    fields: str = "{}"
    told: Sequence[str] = ()


Parts = Mapping[Split, Sequence[FileSample]]


class FileTokens(Source, PaddingArgs):
    """Sequences of tokens from a file, which is read and tokenized once; the ids are kept in memory."""

    file: str | None = None
    tokenizer: str = BYTES
    special_tokens: bool = True
    labels: bool = False

    @abstractmethod
    def read(self, root: Path | None) -> tuple[Tokenizer, TokenLayout, Parts]:
        """The samples of each split, at least one in all. Raises SpecError for a file that cannot be used."""

    @abstractmethod
    def none_for(self, split: Split, total: int, layout: TokenLayout) -> SpecError:
        """The error if none of all samples is for the split."""

    def inspect(self, root: Path | None, split: Split) -> DataInfo:
        tokenizer, layout, parts = self.read(root)
        samples = list(chain.from_iterable(parts[part] for part in SPLITS))
        if not parts[split]:
            raise self.none_for(split, len(samples), layout)
        sizes = {part: len(parts[part]) for part in SPLITS}
        spans = list(dict.fromkeys(chain.from_iterable(sample.spans for sample in samples)))
        names_both = bool(samples[0].answer and samples[0].wrong)
        info = layout.describe(self.name, sizes, tokenizer, spans, wrong=names_both)
        fields = values_of_fields(tuple(sample.fields for sample in samples))
        return replace(info, fields=fields, remarks=samples[0].told.__iter__)

    def open(self, root: Path | None, split: Split, seed: int) -> Samples:
        info = self.inspect(root, split)
        _, layout, parts = self.read(root)
        samples = parts[split]
        places = [sample.place for sample in samples]
        fields = [sample.fields for sample in samples]
        sequence = partial(self._sequence, samples)
        return TokenSamples(layout, len(samples), sequence, info.spans, places, fields, info.fields)

    def _sequence(self, samples: Sequence[FileSample], number: int) -> TokenSequence:
        sample = samples[number]
        ids = torch.tensor(sample.ids, dtype=torch.int64)
        targets = next_tokens(ids)
        labels = ids
        if sample.answer:
            labels = torch.tensor(sample.answer)
            targets = torch.full((len(ids),), IGNORED)
            targets[-1] = sample.answer[0]
        wrong = sample.wrong[0] if sample.wrong else None
        return TokenSequence(ids, targets, labels if self.labels else None, sample.spans, wrong)
