"""Prompts from a .jsonl file, with the right and the wrong next token and named spans of tokens."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from hookrun.data.info import SPLITS, DataInfo, Split
from hookrun.data.samples import IGNORED, Samples
from hookrun.data.source import Source, part_of
from hookrun.data.text_files import ReadSequences, Stamp, asked_file, checked_file, records, text_field
from hookrun.data.tokenizer import BYTES, WHERE, Encoded, Tokenizer, tokenizer_named
from hookrun.data.tokens import (
    MOST_LENGTH,
    PaddingArgs,
    TokenLayout,
    TokenSamples,
    TokenSequence,
    next_tokens,
)
from hookrun.errors import Problem, SpecError, printable, reason

FILE = "data.args.file"
_MOST_SPANS = 64  # names in a file


class PromptsArgs(PaddingArgs):
    """Which file, and what its fields are called.

    file:           .jsonl: one object on each line
    prompt:         the field of the text
    answer, wrong:  the fields of the right and the wrong continuation, of which the first token is used. null: not
                    read; with these default names the fields may be missing. Without an answer the targets are the
                    prompt's own next tokens
    spans:          the field of a mapping: name -> a part of the text, which comes once in it, or token positions
                    [first, end], the end excluded, counted from the first token. Or such a mapping, for every prompt
    tokenizer:      the folder of a tokenizer of transformers, or bytes
    length:         the largest number of tokens in a prompt, including special ones; null: that of the longest prompt
    special_tokens: whether the tokenizer adds its special tokens to a prompt
    val_fraction:   the fixed fraction of the prompts that is for validation; 1: all, in the file's order
    labels:         whether the model also gets the whole answer as `labels`: for encoder-decoders
    """

    file: str | None = None
    prompt: str = "prompt"
    answer: str | None = "answer"
    wrong: str | None = "wrong"
    spans: str | dict[str, Any] | None = "spans"
    tokenizer: str = BYTES
    length: int | None = Field(default=None, ge=1, le=MOST_LENGTH)
    special_tokens: bool = True
    val_fraction: float = Field(default=1, ge=0, le=1)
    labels: bool = False


@dataclass
class _Read:
    """The prompts of a file.

    answers: the tokens of each answer; empty where there are none
    wrong:   the first token of each wrong answer; empty where there are none
    spans:   name -> first position and end of each prompt's span, one after the other
    """

    prompts: ReadSequences = field(default_factory=lambda: ReadSequences(FILE))
    answers: ReadSequences = field(default_factory=lambda: ReadSequences(FILE))
    wrong: array[int] = field(default_factory=lambda: array("i"))
    spans: dict[str, array[int]] = field(default_factory=dict)

    def span(self, name: str, number: int) -> tuple[int, int]:
        """First position and end of a prompt's span; NO_SPAN if it has none."""
        found = self.spans[name]
        return found[2 * number], found[2 * number + 1]


class Prompts(Source[PromptsArgs]):
    """One sample for each prompt; its target is the answer's first token at the prompt's last."""

    args = PromptsArgs

    def inspect(self, root: Path | None, args: PromptsArgs, split: Split) -> DataInfo:
        tokenizer, path, read = _read(root, args)
        sizes: dict[Split, int | None] = {each: len(_part(args, read, each)) for each in SPLITS}
        if sizes[split] == 0:
            what = f"none of the {len(read.prompts)} prompts in {path} is for the split '{split}'"
            what += f" (val_fraction {args.val_fraction})"
            raise SpecError([Problem("data.args.val_fraction", what, "set it between 0 and 1")])
        names_both = len(read.answers) > 0 and len(read.wrong) > 0
        return _layout(args, tokenizer, path, read).describe(
            self.name, sizes, tokenizer, list(read.spans), wrong=names_both
        )

    def open(self, root: Path | None, args: PromptsArgs, split: Split, seed: int) -> Samples:
        self.inspect(root, args, split)
        tokenizer, path, read = _read(root, args)
        layout = _layout(args, tokenizer, path, read)
        return _PromptSamples(layout, path, read, _part(args, read, split))


class _PromptSamples(TokenSamples):
    def __init__(self, layout: TokenLayout, path: Path, read: _Read, numbers: Sequence[int]) -> None:
        super().__init__(layout, list(read.spans))
        self._labels = layout.labels is not None
        self._path = path
        self._read = read
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def sequence(self, number: int) -> TokenSequence:
        read, place = self._read, self._numbers[number]
        ids = read.prompts[place]
        answer = read.answers[place] if len(read.answers) else None
        if answer is None:
            targets = next_tokens(ids)
        else:
            targets = torch.full((len(ids),), IGNORED)
            targets[-1] = answer[0]
        return TokenSequence(
            ids,
            targets,
            answer if self._labels else None,
            {name: read.span(name, place) for name in read.spans},
            read.wrong[place] if read.wrong else None,
        )

    def file(self, index: int) -> str:
        """File and line: ``prompts.jsonl:17``."""
        return f"{self._path.name}:{self._read.prompts.line(self._numbers[index])}"


def _part(args: PromptsArgs, read: _Read, split: Split) -> Sequence[int]:
    return part_of(len(read.prompts), args.val_fraction, val=split == "val")


def _layout(args: PromptsArgs, tokenizer: Tokenizer, path: Path, read: _Read) -> TokenLayout:
    length = read.prompts.length(args.length, "data.args.length")
    if read.prompts.longest > length:
        line = next(read.prompts.line(n) for n in range(len(read.prompts)) if len(read.prompts[n]) > length)
        what = f"{path} line {line} has a prompt of more tokens than {length}; the longest has {read.prompts.longest}"
        raise SpecError([Problem("data.args.length", what, "set it higher, or to null")])
    labels = read.answers.longest if args.labels else None
    return args.layout(length, tokenizer.pad_id, labels, answers=True)


def _read(root: Path | None, args: PromptsArgs) -> tuple[Tokenizer, Path, _Read]:
    """The tokenizer, the path of the file and its prompts. Raises SpecError for a file that cannot be used."""
    tokenizer = tokenizer_named(args.tokenizer)
    path = asked_file(args.file, root, FILE)
    stamp = checked_file(path, FILE, (".jsonl",))
    read = _tokenized(path, stamp, _Wanted(args, tokenizer))
    if not len(read.prompts):
        raise SpecError([Problem(FILE, f"{path} holds no prompt", "write one JSON object on each line")])
    if args.labels and not len(read.answers):
        what = f"{path} has no answers, which would be the model's labels"
        raise SpecError([Problem("data.args.labels", what, "leave it out, or name the field of the answers")])
    return tokenizer, path, read


class _Wanted:
    """The arguments that decide what is read from a file, for the cache."""

    def __init__(self, args: PromptsArgs, tokenizer: Tokenizer) -> None:
        self.args = args
        self.tokenizer = tokenizer
        self._key = (args.model_dump_json(), tokenizer)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Wanted) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)


@lru_cache(maxsize=2)  # a data set is described before it is loaded; the stamp changes with the file
def _tokenized(path: Path, stamp: Stamp, wanted: _Wanted) -> _Read:
    reader = _Reader(path, wanted.args, wanted.tokenizer)
    for number, record in records(path, FILE):
        reader.add(number, record)
    return reader.read


class _Reader:
    """Reads prompts line by line; each line must have the fields of the first."""

    def __init__(self, path: Path, args: PromptsArgs, tokenizer: Tokenizer) -> None:
        self._path = path
        self._args = args
        self._tokenizer = tokenizer
        self._fields: dict[str, str] = {}
        self.read = _Read()

    def add(self, number: int, record: dict[str, Any]) -> None:
        """Add the prompt of one line. Raises SpecError."""
        at = f"{self._path} line {number}"
        if not len(self.read.prompts):
            self._fields = self._optional(record)
        text = text_field(record, self._args.prompt, at, "data.args.prompt")
        spans = self._spans(record, at)
        encoded = self._encoded(text, at, special=self._args.special_tokens, offsets=bool(spans))
        if not len(encoded.ids):
            raise SpecError([Problem("data.args.prompt", f"{at}: the prompt has no tokens", "write a text")])
        answer, wrong = (self._next(record, key, at) for key in ("answer", "wrong"))
        if answer and wrong and answer[0] == wrong[0]:
            token = self._tokenizer.tokens(answer[:1])[0]
            what = f"{at}: the answer and the wrong one begin with the same token, {token!r}"
            hint = "give two that differ in their first token, or leave the wrong one out"
            if self._args.tokenizer == "bytes":
                hint += "; data.args.tokenizer=bytes has a token for each byte: a common space goes to the prompt's end"
            raise SpecError([Problem("data.args.wrong", what, hint)])
        self._add_spans(spans, text, encoded, at)
        self.read.prompts.append(encoded.ids, number)
        if answer:
            self.read.answers.append(answer, number)
        if wrong:
            self.read.wrong.append(wrong[0])

    def _optional(self, record: Mapping[str, Any]) -> dict[str, str]:
        """The fields of answers that the file has: those that were named, and ours where the first line has them."""
        named = {key: getattr(self._args, key) for key in ("answer", "wrong")}
        return {
            key: name for key, name in named.items() if name is not None and (name in record or name != key)
        }

    def _next(self, record: dict[str, Any], key: str, at: str) -> list[int]:
        """The tokens of the answer or the wrong one; none where the file has none."""
        if key not in self._fields:
            name = getattr(self._args, key)
            if name is not None and name in record:
                what = f"{at} has a field '{name}', which lines before it do not have"
                raise SpecError([Problem(f"data.args.{key}", what, "give every prompt one, or none")])
            return []
        where = f"data.args.{key}"
        text = text_field(record, self._fields[key], at, where)
        ids = list(self._encoded(text, at).ids)
        if not ids:
            raise SpecError([Problem(where, f"{at}: '{self._fields[key]}' has no tokens", "write a text")])
        return ids

    def _encoded(self, text: str, at: str, *, special: bool = False, offsets: bool = False) -> Encoded:
        try:
            return self._tokenizer.encode(text, special=special, offsets=offsets)
        except Exception as error:  # a tokenizer of a folder may raise anything
            raise SpecError([Problem(WHERE, f"{at} cannot be tokenized: {reason(error)}")]) from error

    def _spans(self, record: dict[str, Any], at: str) -> dict[str, Any]:
        asked = self._args.spans
        if isinstance(asked, dict):
            return asked
        found = record.get(asked) if asked is not None else None
        if found is not None and not isinstance(found, dict):
            what = f"{at}: the field '{asked}' is not a mapping from names to parts of the text"
            raise SpecError([Problem("data.args.spans", what, 'write {"subject": "Paris"}')])
        return found or {}

    def _add_spans(self, spans: Mapping[str, Any], text: str, encoded: Encoded, at: str) -> None:
        known, count = self.read.spans, len(self.read.prompts)
        for name in spans:
            if name not in known:
                if len(known) == _MOST_SPANS:
                    what = f"{at}: a file may have {_MOST_SPANS} names of spans, and this is one more"
                    raise SpecError([Problem("data.args.spans", what)])
                known[name] = array("i", [-1] * (2 * count))
        for name, places in known.items():
            places.extend(_positions(name, spans[name], text, encoded, at) if name in spans else (-1, -1))


def _positions(name: str, span: Any, text: str, encoded: Encoded, at: str) -> tuple[int, int]:
    """First position and end of a span among the tokens. Raises SpecError if it is not found or is ambiguous."""
    where = f"data.args.spans.{printable(name[:80])}"
    count = len(encoded.ids)
    if isinstance(span, list) and len(span) == 2 and all(type(each) is int for each in span):
        first, end = span
        if not 0 <= first < end <= count:
            what = f"{at}: found {span!r}, expected [first, end] with 0 <= first < end <= {count}, the prompt's tokens"
            raise SpecError([Problem(where, what[:500], "positions count from 0, and the end is excluded")])
        return first, end
    if not isinstance(span, str) or not span:
        what = f"{at}: found {str(span)[:80]!r}, expected a part of the text or [first, end]"
        raise SpecError([Problem(where, what)])
    start = text.find(span)
    if start < 0:
        what = f"{at}: {span[:80]!r} is not in the prompt {text[:80]!r}"
        raise SpecError(
            [Problem(where, what, "correct it: it must be a part of the prompt, letter by letter")]
        )
    if text.find(span, start + 1) >= 0:
        what = f"{at}: {span[:80]!r} is in the prompt more than once: {text[:80]!r}"
        raise SpecError([Problem(where, what, "give token positions: [first, end]")])
    stop = start + len(span)
    inside = [place for place, (a, b) in enumerate(encoded.offsets) if a < stop and b > start and b > a]
    if not inside:
        raise SpecError([Problem(where, f"{at}: no token stands for {span[:80]!r}", "give token positions")])
    return inside[0], inside[-1] + 1


PROMPTS = Prompts("prompts")
