"""Prompts from a .jsonl file, with the right and the wrong next token and named spans of tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field

from hookrun.data.info import SPLITS, Split
from hookrun.data.source import Stamp, checked_file, part_of
from hookrun.data.text_files import (
    FileSample,
    FileTokens,
    Parts,
    encode,
    own_fields,
    padded_length,
    records,
    require_few_tokens,
    text_field,
)
from hookrun.data.tokenizer import Encoded, Tokenizer, tokenizer_named
from hookrun.data.tokens import AMBIGUOUS, MOST_LENGTH, TokenLayout
from hookrun.errors import SpecError, printable, spec_error

FILE = "data.args.file"
_MOST_SPANS = 64  # names in a file
_SHOWN = 4  # tokens of the prompt in an error about its answer


class Prompts(FileTokens):
    """Which file, and what its fields are called. Each prompt is a sample, with the answer's first token as target.

    The tokens of an answer are those that the prompt and the answer together have behind the prompt's. A token that has
    a part of both is refused. An answer that is also the model's `labels` is a text of its own.

    file:           .jsonl: one object on each line
    prompt:         the field of the text
    answer, wrong:  the fields of the right and the wrong continuation, of which the first token is used. null: not
                    read; with these default names the fields may be missing. Without an answer the targets are the
                    prompt's own next tokens
    spans:          the field of a mapping: name -> a part of the text, or token positions [first, end], the end
                    excluded, counted from the first token; null: the prompt has no such span. Or such a mapping, for
                    every prompt; null: none is read. A part that is in the text more than once is refused where a
                    hook or the task uses its span
    tokenizer:      the folder of a tokenizer of transformers, or bytes
    length:         the largest number of tokens in a prompt, including special ones; null: that of the longest prompt
    special_tokens: whether the tokenizer adds its special tokens to a prompt. The ones that it puts behind a text are
                    left out where an answer follows; one that is written in the prompt stays
    val_fraction:   the fixed fraction of the prompts that is for validation; 1: all, in the file's order
    labels:         whether the model also gets the whole answer as `labels`: for encoder-decoders
    """

    name = "prompts"
    prompt: str = "prompt"
    answer: str | None = "answer"
    wrong: str | None = "wrong"
    spans: str | dict[str, Any] | None = "spans"
    length: int | None = Field(default=None, ge=1, le=MOST_LENGTH)
    val_fraction: float = Field(default=1, ge=0, le=1)

    def none_for(self, split: Split, total: int, layout: TokenLayout) -> SpecError:
        return spec_error(
            "data.args.val_fraction",
            f"none of the {total} prompts in {self.file} is for the split '{split}' "
            f"(val_fraction {self.val_fraction})",
            "set it between 0 and 1",
        )

    def read(self, root: Path | None) -> tuple[Tokenizer, TokenLayout, Parts]:
        tokenizer = tokenizer_named(self.tokenizer)
        path, stamp = checked_file(self.file, root, FILE, (".jsonl",))
        prompts = _prompts(self.model_dump_json(), path, stamp, tokenizer)
        if not prompts:
            raise spec_error(FILE, f"{path} holds no prompt", "write one JSON object on each line")
        if self.labels and not prompts[0].answer:
            raise spec_error(
                "data.args.labels",
                f"{path} has no answers, which would be the model's labels",
                "leave it out, or name the field of the answers",
            )
        longest = max(len(prompt.ids) for prompt in prompts)
        length = self.length or padded_length(longest, "data.args.length")
        for prompt in prompts:
            if len(prompt.ids) > length:
                line = prompt.place.rpartition(":")[2]
                what = (
                    f"{path} line {line} has a prompt of more tokens than {length}; the longest has {longest}"
                )
                raise spec_error("data.args.length", what, "set it higher, or to null")
        labels = max(len(prompt.answer) for prompt in prompts) if self.labels else None
        layout = self.layout(length, tokenizer.pad_id, labels, answers=True)
        parts: dict[Split, list[FileSample]] = {}
        for split in SPLITS:
            numbers = part_of(len(prompts), self.val_fraction, split)
            parts[split] = [prompts[number] for number in numbers]
        return tokenizer, layout, parts


@lru_cache(maxsize=2)  # a data set is described before it is loaded; the stamp changes with the file
def _prompts(args: str, path: Path, stamp: Stamp, tokenizer: Tokenizer) -> list[FileSample]:
    """Every prompt of a file. args: the arguments of `Prompts` in JSON, which can be a key of the cache."""
    keys = Prompts.model_validate_json(args)
    prompts: list[FileSample] = []
    fields = set[str]()
    span_names = set[str]()
    field_names = set[str]()
    count = 0
    for number, record in records(path, FILE):
        if not prompts:
            fields = _answer_fields(keys, record)
        own = own_fields(record, keys.prompt, field_names)
        prompt = _prompt(keys, fields, record, number, path, tokenizer, own)
        span_names.update(prompt.spans)
        if len(span_names) > _MOST_SPANS:
            what = (
                f"{path} line {number}: a file may have {_MOST_SPANS} names of spans, and this has one more"
            )
            raise spec_error("data.args.spans", what)
        count += len(prompt.ids) + len(prompt.answer)
        require_few_tokens(count, FILE)
        prompts.append(replace(prompt, told=()) if prompts else prompt)
    return prompts


def _answer_fields(keys: Prompts, record: dict[str, Any]) -> set[str]:
    """`answer` and `wrong`, as far as they are read; those with these default names may be missing."""
    fields = set[str]()
    for key, name in (("answer", keys.answer), ("wrong", keys.wrong)):
        if name is not None and (name in record or name != key):
            fields.add(key)
    return fields


def _prompt(
    keys: Prompts,
    fields: set[str],
    record: dict[str, Any],
    number: int,
    path: Path,
    tokenizer: Tokenizer,
    own: str,
) -> FileSample:
    """The prompt of one line. Raises SpecError.

    fields: `answer` and `wrong`, as far as they are read
    own:    the fields that the sample keeps, in JSON
    """
    at = f"{path} line {number}"
    text = text_field(record, keys.prompt, at, "data.args.prompt")
    spans: Any = keys.spans
    if isinstance(spans, str):
        spans = record.get(spans)
    if spans is None:
        spans = {}
    if not isinstance(spans, dict):
        what = f"{at}: the field '{keys.spans}' is not a mapping from names to parts of the text"
        raise spec_error("data.args.spans", what, 'write {"subject": "Paris"}')
    encoded = encode(tokenizer, text, at, special=keys.special_tokens, offsets=bool(spans))
    if not len(encoded.ids):
        raise spec_error("data.args.prompt", f"{at}: the prompt has no tokens", "write a text")
    if fields and not keys.labels:
        encoded = replace(encoded, ids=encoded.open_ids)
    answers = dict[str, list[int]](answer=[], wrong=[])
    told: list[str] = []
    for key, ids in answers.items():
        where = f"data.args.{key}"
        name = getattr(keys, key)
        if key not in fields:
            if name in record:
                what = f"{at} has a field '{name}', which lines before it do not have"
                raise spec_error(where, what, "give every prompt one, or none")
            continue
        answer = text_field(record, name, at, where)
        if keys.labels:  # an encoder-decoder's answer is a text of its own
            ids += encode(tokenizer, answer, at).ids
        else:
            both = encode(tokenizer, text + answer, at, special=keys.special_tokens, offsets=True)
            ids += _following(encoded.ids, both, len(text), tokenizer, f"{at}: '{name}'", where)
        if not ids:
            raise spec_error(where, f"{at}: '{name}' has no tokens", "write a text")
        told.append(f"{path.name}:{number}: {answer[:80]!r} → {tokenizer.tokens(ids[:1])[0]!r}")
    if fields == answers.keys() and answers["answer"][0] == answers["wrong"][0]:
        token = tokenizer.tokens(answers["answer"][:1])[0]
        what = f"{at}: the answer and the wrong one begin with the same token, {token!r}"
        hint = "give two that differ in their first token, or none; a common space goes to the prompt's end"
        raise spec_error("data.args.wrong", what, hint)
    if told:
        told.append(f"{path.name}:{number}: the prompt ends with {tokenizer.tokens(encoded.ids[-1:])[0]!r}")
    places: dict[str, tuple[int, int]] = {}
    for name, span in spans.items():
        if span is not None:
            places[name] = _positions(name, span, text, encoded, at)
    tokens = array("i", list(encoded.ids))
    return FileSample(f"{path.name}:{number}", tokens, answers["answer"], answers["wrong"], places, own, told)


def _following(
    prompt: Sequence[int], both: Encoded, border: int, tokenizer: Tokenizer, at: str, where: str
) -> Sequence[int]:
    """The tokens of an answer behind those of its prompt. Raises SpecError if a token has a part of each.

    both:   prompt and answer
    border: the first character of the answer
    """
    ids = both.open_ids
    if ids[: len(prompt)] == prompt and not any(start < border < end for start, end in both.offsets):
        return ids[len(prompt) :]
    first = max(len(prompt) - _SHOWN, 0)
    alone = " ".join(map(repr, tokenizer.tokens(prompt[first:])))
    together = " ".join(map(repr, tokenizer.tokens(ids[first:])))
    what = f"the prompt ends with {alone}, and the answer makes it {together}"
    hint = "the space between prompt and answer belongs to the answer"
    raise spec_error(where, f"{at} does not begin with a token of its own: {what[:500]}", hint)


def _positions(name: str, span: Any, text: str, encoded: Encoded, at: str) -> tuple[int, int]:
    """First position and end of a span among the tokens; AMBIGUOUS. Raises SpecError if it is not found."""
    where = f"data.args.spans.{printable(name[:80])}"
    count = len(encoded.ids)
    if isinstance(span, list) and len(span) == 2 and all(type(each) is int for each in span):
        first, end = span
        if not 0 <= first < end <= count:
            what = f"{at}: found {span!r}, expected [first, end] with 0 <= first < end <= {count}, the prompt's tokens"
            raise spec_error(where, what[:500], "positions count from 0, and the end is excluded")
        return first, end
    if not isinstance(span, str) or not span:
        what = f"{at}: found {str(span)[:80]!r}, expected a part of the text or [first, end]"
        raise spec_error(where, what)
    start = text.find(span)
    if start < 0:
        what = f"{at}: {span[:80]!r} is not in the prompt {text[:80]!r}"
        raise spec_error(where, what, "correct it: it must be a part of the prompt, letter by letter")
    if text.find(span, start + 1) >= 0:
        return AMBIGUOUS
    stop = start + len(span)
    inside: list[int] = []
    for place, (begin, end) in enumerate(encoded.offsets):
        if begin < stop and end > start and end > begin:
            inside.append(place)
    if not inside:
        raise spec_error(where, f"{at}: no token stands for {span[:80]!r}", "give token positions")
    return inside[0], inside[-1] + 1
