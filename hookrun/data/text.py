"""A user's own text from .txt and .jsonl files, in blocks of a fixed length or document by document."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from pydantic import Field

from hookrun.data.info import SPLITS, Split
from hookrun.data.source import Stamp, checked_file, part_of
from hookrun.data.text_files import (
    FileSample,
    FileTokens,
    Parts,
    encode,
    lines,
    own_fields,
    padded_length,
    records,
    require_few_tokens,
    text_field,
)
from hookrun.data.tokenizer import Tokenizer, tokenizer_named
from hookrun.data.tokens import MOST_LENGTH, TokenLayout
from hookrun.errors import SpecError, spec_error

SUFFIXES = (".txt", ".jsonl")
_BLOCK = 128
"""Tokens of a sample of packed text, if no length is given."""


class Text(FileTokens):
    """Which text, and how it becomes samples.

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
    val_file: str | None = None
    val_fraction: float = Field(default=0.2, ge=0, le=1)
    field: str = "text"
    packed: bool = True
    length: int | None = Field(default=None, ge=2, le=MOST_LENGTH)

    def none_for(self, split: Split, total: int, layout: TokenLayout) -> SpecError:
        hint = "change data.args.val_fraction, or give a file with more text"
        if self.packed:
            hint += f"; a sample is {layout.length} tokens: data.args.length=N makes it shorter, "
            hint += "and with data.args.packed=false it is a line"
        return spec_error(
            "data.args.val_fraction",
            f"{self.file} has {total} samples, and none is for the split '{split}'",
            hint,
        )

    def read(self, root: Path | None) -> tuple[Tokenizer, TokenLayout, Parts]:
        tokenizer = tokenizer_named(self.tokenizer)
        files: list[list[FileSample]] = []
        for key in ("file",) if self.val_file is None else ("file", "val_file"):
            where = f"data.args.{key}"
            path, stamp = checked_file(getattr(self, key), root, where, SUFFIXES)
            files.append(_samples(self, path, stamp, where, tokenizer))
        parts = dict[Split, list[FileSample]](zip(SPLITS, files, strict=False))
        if self.val_file is None:
            for split in SPLITS:
                numbers = part_of(len(files[0]), self.val_fraction, split)
                parts[split] = [files[0][number] for number in numbers]
        length = self.length or _BLOCK
        if not self.packed and self.length is None:
            longest = max(len(sample.ids) for samples in files for sample in samples)
            length = padded_length(longest, "data.args.length")
        return tokenizer, self.layout(length, tokenizer.pad_id, length if self.labels else None), parts


@lru_cache(maxsize=2)  # a data set is described before it is loaded; the stamp changes with the file
def _samples(text: Text, path: Path, stamp: Stamp, where: str, tokenizer: Tokenizer) -> list[FileSample]:
    """The samples of a file. Raises SpecError where it has none."""
    documents = _tokenized(text, path, where, tokenizer)
    if text.packed:
        samples = list(_blocks(documents, path, text.length or _BLOCK))
    else:
        samples = list[FileSample]()
        for number, ids, fields in documents:
            if ids:
                samples.append(FileSample(f"{path.name}:{number}", ids[: text.length], fields=fields))
    if not samples:
        raise spec_error(where, f"{path} holds no text", "give a file that does")
    return samples


def _blocks(
    documents: Iterable[tuple[int, array[int], str]], path: Path, length: int
) -> Iterator[FileSample]:
    """The documents laid end to end and cut into blocks; the last may be shorter."""
    block = array("i")
    place = ""
    for number, ids, _ in documents:
        start = 0
        while start < len(ids):
            if not block:
                place = f"{path.name}:{number}"
            end = start + length - len(block)
            block += ids[start:end]
            start = end
            if len(block) == length:
                yield FileSample(place, block)
                block = array("i")
    if block:
        yield FileSample(place, block)


def _tokenized(
    text: Text, path: Path, where: str, tokenizer: Tokenizer
) -> Iterator[tuple[int, array[int], str]]:
    """Number of the first line, token ids, and own fields in JSON, of each document."""
    special = text.special_tokens and not text.packed
    count = 0
    for number, document, fields in _documents(path, where, text.field, text.packed):
        encoded = encode(tokenizer, document, f"{path} line {number}", special=special)
        ids = array("i", list(encoded.ids))
        if text.packed and path.suffix == ".jsonl" and tokenizer.separator is not None:
            ids.append(tokenizer.separator)
        count += len(ids)
        require_few_tokens(count, where)
        yield number, ids, fields


_TOGETHER = 2**16
"""Characters of packed text that are tokenized at once; token boundaries depend on the preceding text."""


def _documents(path: Path, where: str, field: str, packed: bool) -> Iterator[tuple[int, str, str]]:
    """Number of the first line, text, and own fields in JSON, of each document; of packed .txt pieces of lines."""
    names = set[str]()
    if path.suffix == ".jsonl":
        for number, record in records(path, where):
            document = text_field(record, field, f"{path} line {number}", "data.args.field")
            yield number, document, own_fields(record, field, names)
        return
    if not packed:
        for number, line in lines(path, where):
            if line.strip():
                yield number, line.strip(), "{}"
        return
    first = 1
    piece = list[str]()
    size = 0
    for number, line in lines(path, where):
        piece.append(line)
        size += len(line)
        if size >= _TOGETHER:
            yield first, "".join(piece), "{}"
            first = number + 1
            piece = []
            size = 0
    if piece:
        yield first, "".join(piece), "{}"
