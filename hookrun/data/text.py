"""A user's own text from .txt and .jsonl files, in blocks of a fixed length or document by document."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
from pydantic import Field

from hookrun.data.info import SPLITS, DataInfo, Split
from hookrun.data.samples import Samples
from hookrun.data.source import Source, part_of
from hookrun.data.text_files import (
    Stamp,
    checked_file,
    encode,
    lines,
    padded_length,
    records,
    require_few_tokens,
    text_field,
)
from hookrun.data.tokenizer import BYTES, Tokenizer, tokenizer_named
from hookrun.data.tokens import (
    MOST_LENGTH,
    PaddingArgs,
    TokenLayout,
    TokenSamples,
    TokenSequence,
    next_tokens,
)
from hookrun.errors import spec_error

SUFFIXES = (".txt", ".jsonl")
_BLOCK = 128
"""Tokens of a sample of packed text, if no length is given."""


@dataclass(frozen=True, slots=True)
class _Passage:
    """The token ids of a document or of a block, and the place of its first line: ``corpus.txt:17``."""

    ids: array[int]
    place: str


class Text(Source, PaddingArgs):
    """Which text, and how it becomes samples. It is read and tokenized once, and its ids are kept in memory.

    file:           .txt, or .jsonl whose field `field` holds a document on each line
    val_file:       a file for validation; null: a fixed fraction `val_fraction` of the samples
    tokenizer:      the folder of a tokenizer of transformers, or bytes
    packed:         true: all documents are concatenated, separated by the tokenizer's end-of-text token (bytes: a line
                    break), and cut into samples of `length` tokens, of which the last may be shorter. false: one sample
                    for each document (.txt: each line that is not blank), truncated to `length`
    length:         tokens of a sample; null: of the longest document, or 128 if the text is packed
    special_tokens: whether the tokenizer adds its special tokens to documents that are not packed
    labels:         whether the model also gets the tokens as `labels`, from which models of transformers compute a loss
    """

    name = "text"
    file: str | None = None
    val_file: str | None = None
    val_fraction: float = Field(default=0.2, ge=0, le=1)
    field: str = "text"
    tokenizer: str = BYTES
    packed: bool = True
    length: int | None = Field(default=None, ge=2, le=MOST_LENGTH)
    special_tokens: bool = True
    labels: bool = False

    def inspect(self, root: Path | None, split: Split) -> DataInfo:
        tokenizer, path, parts = self._read(root)
        sizes: dict[Split, int | None] = {part: len(parts[part]) for part in SPLITS}
        layout = self._layout(tokenizer, parts)
        if sizes[split] == 0:
            total = len(parts["train"]) + len(parts["val"])
            what = f"{path} has {total} samples, and none is for the split '{split}'"
            hint = "change data.args.val_fraction, or give a file with more text"
            if self.packed:
                hint += f"; a sample is {layout.length} tokens: data.args.length=N makes it shorter, "
                hint += "and with data.args.packed=false it is a line"
            raise spec_error("data.args.val_fraction", what, hint)
        return layout.describe(self.name, sizes, tokenizer)

    def open(self, root: Path | None, split: Split, seed: int) -> Samples:
        self.inspect(root, split)
        tokenizer, _, parts = self._read(root)
        layout, part = self._layout(tokenizer, parts), parts[split]
        return TokenSamples(layout, len(part), partial(self._sequence, part), place=partial(_place, part))

    def _sequence(self, part: Sequence[_Passage], number: int) -> TokenSequence:
        ids = torch.tensor(part[number].ids, dtype=torch.int64)
        return TokenSequence(ids, next_tokens(ids), ids if self.labels else None)

    def _layout(self, tokenizer: Tokenizer, parts: dict[Split, list[_Passage]]) -> TokenLayout:
        length = self.length or _BLOCK
        if not self.packed and self.length is None:
            longest = max(len(passage.ids) for part in parts.values() for passage in part)
            length = padded_length(longest, "data.args.length")
        return self.layout(length, tokenizer.pad_id, length if self.labels else None)

    def _read(self, root: Path | None) -> tuple[Tokenizer, Path, dict[Split, list[_Passage]]]:
        """The tokenizer, the path of `file` and the samples of each split. Raises SpecError for an unusable file."""
        tokenizer = tokenizer_named(self.tokenizer)
        path, stamp = checked_file(self.file, root, "data.args.file", SUFFIXES)
        whole = _passages(self, path, stamp, "data.args.file", tokenizer)
        if self.val_file is not None:
            val_path, val_stamp = checked_file(self.val_file, root, "data.args.val_file", SUFFIXES)
            val = _passages(self, val_path, val_stamp, "data.args.val_file", tokenizer)
            return tokenizer, path, {"train": whole, "val": val}
        train, val = (
            [whole[number] for number in part_of(len(whole), self.val_fraction, split)] for split in SPLITS
        )
        return tokenizer, path, {"train": train, "val": val}


def _place(part: Sequence[_Passage], number: int) -> str:
    return part[number].place


@lru_cache(maxsize=2)  # a data set is described before it is loaded; the stamp changes with the file
def _passages(text: Text, path: Path, stamp: Stamp, where: str, tokenizer: Tokenizer) -> list[_Passage]:
    """The samples of a file. Raises SpecError where it has none."""
    documents = _tokenized(text, path, where, tokenizer)
    if text.packed:
        passages = list(_blocks(documents, path, text.length or _BLOCK))
    else:
        passages = [_Passage(ids[: text.length], f"{path.name}:{number}") for number, ids in documents if ids]
    if not passages:
        raise spec_error(where, f"{path} holds no text", "give a file that does")
    return passages


def _blocks(documents: Iterable[tuple[int, array[int]]], path: Path, length: int) -> Iterator[_Passage]:
    """The documents laid end to end and cut into blocks; the last may be shorter."""
    block, place = array("i"), ""
    for number, ids in documents:
        start = 0
        while start < len(ids):
            if not block:
                place = f"{path.name}:{number}"
            end = start + length - len(block)
            block += ids[start:end]
            start = end
            if len(block) == length:
                yield _Passage(block, place)
                block = array("i")
    if block:
        yield _Passage(block, place)


def _tokenized(text: Text, path: Path, where: str, tokenizer: Tokenizer) -> Iterator[tuple[int, array[int]]]:
    """Number of the first line, and token ids, of each document."""
    special, count = text.special_tokens and not text.packed, 0
    for number, document in _documents(path, where, text.field, text.packed):
        encoded = encode(tokenizer, document, f"{path} line {number}", special=special)
        ids = array("i", list(encoded.ids))
        if text.packed and path.suffix == ".jsonl" and tokenizer.separator is not None:
            ids.append(tokenizer.separator)
        count += len(ids)
        require_few_tokens(count, where)
        yield number, ids


_TOGETHER = 2**16
"""Characters of packed text that are tokenized at once; token boundaries depend on the preceding text."""


def _documents(path: Path, where: str, field: str, packed: bool) -> Iterator[tuple[int, str]]:
    """Number of the first line, and text, of each document; of packed .txt pieces of many whole lines."""
    if path.suffix == ".jsonl":
        for number, record in records(path, where):
            yield number, text_field(record, field, f"{path} line {number}", "data.args.field")
        return
    if not packed:
        yield from ((number, line.strip()) for number, line in lines(path, where) if line.strip())
        return
    first, piece, size = 1, list[str](), 0
    for number, line in lines(path, where):
        piece.append(line)
        size += len(line)
        if size >= _TOGETHER:
            yield first, "".join(piece)
            first, piece, size = number + 1, [], 0
    if piece:
        yield first, "".join(piece)
