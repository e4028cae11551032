"""A user's own text from .txt and .jsonl files, in blocks of a fixed length or document by document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from pydantic import Field

from hookrun.data.info import SPLITS, DataInfo, Split
from hookrun.data.samples import Samples
from hookrun.data.source import Source, part_of
from hookrun.data.text_files import ReadSequences, Stamp, asked_file, checked_file, lines, records, text_field
from hookrun.data.tokenizer import BYTES, WHERE, Tokenizer, tokenizer_named
from hookrun.data.tokens import (
    MOST_LENGTH,
    PaddingArgs,
    TokenLayout,
    TokenSamples,
    TokenSequence,
    next_tokens,
)
from hookrun.errors import Problem, SpecError, reason

SUFFIXES = (".txt", ".jsonl")


class TextArgs(PaddingArgs):
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

    file: str | None = None
    val_file: str | None = None
    val_fraction: float = Field(default=0.2, ge=0, le=1)
    field: str = "text"
    tokenizer: str = BYTES
    packed: bool = True
    length: int | None = Field(default=None, ge=2, le=MOST_LENGTH)
    special_tokens: bool = True
    labels: bool = False


@dataclass(frozen=True)
class _Corpus:
    """The samples of a file, before it is split."""

    path: Path
    sequences: ReadSequences
    packed: bool
    length: int

    def __len__(self) -> int:
        return -(-self.sequences.tokens // self.length) if self.packed else len(self.sequences)

    def ids(self, number: int) -> torch.Tensor:
        """The token ids of one sample, [n] int64."""
        if self.packed:
            start = number * self.length
            return self.sequences.span(start, start + self.length)
        return self.sequences[number][: self.length]

    def place(self, number: int) -> str:
        """File and line where the sample begins."""
        at = self.sequences.line_at(number * self.length) if self.packed else self.sequences.line(number)
        return f"{self.path.name}:{at}"


class Text(Source[TextArgs]):
    """The text is read and tokenized once, and its ids are kept in memory."""

    args = TextArgs

    def inspect(self, root: Path | None, args: TextArgs, split: Split) -> DataInfo:
        tokenizer, corpora = _read(root, args)
        sizes: dict[Split, int | None] = {each: len(_numbers(args, corpora, each)) for each in SPLITS}
        if sizes[split] == 0:
            what = f"{corpora['train'].path} has {len(corpora['train'])} samples, and none is for the split '{split}'"
            hint = "change data.args.val_fraction, or give a file with more text"
            if args.packed:
                hint += (
                    f"; a sample is {corpora['train'].length} tokens: data.args.length=N makes it shorter, "
                )
                hint += "and with data.args.packed=false it is a line"
            raise SpecError([Problem("data.args.val_fraction", what, hint)])
        return _layout(args, tokenizer, corpora).describe(self.name, sizes, tokenizer)

    def open(self, root: Path | None, args: TextArgs, split: Split, seed: int) -> Samples:
        self.inspect(root, args, split)
        tokenizer, corpora = _read(root, args)
        layout = _layout(args, tokenizer, corpora)
        return _TextSamples(layout, corpora[split], _numbers(args, corpora, split), labels=args.labels)


class _TextSamples(TokenSamples):
    def __init__(self, layout: TokenLayout, corpus: _Corpus, numbers: Sequence[int], *, labels: bool) -> None:
        super().__init__(layout)
        self._corpus = corpus
        self._numbers = numbers
        self._labels = labels

    def __len__(self) -> int:
        return len(self._numbers)

    def sequence(self, number: int) -> TokenSequence:
        ids = self._corpus.ids(self._numbers[number])
        return TokenSequence(ids, next_tokens(ids), ids if self._labels else None)

    def file(self, index: int) -> str:
        """File and line: ``corpus.txt:17``."""
        return self._corpus.place(self._numbers[index])


def _numbers(args: TextArgs, corpora: dict[Split, _Corpus], split: Split) -> Sequence[int]:
    """The samples of a split in its corpus."""
    count = len(corpora[split])
    if args.val_file is not None:
        return range(count)
    return part_of(count, args.val_fraction, val=split == "val")


def _layout(args: TextArgs, tokenizer: Tokenizer, corpora: dict[Split, _Corpus]) -> TokenLayout:
    length = max(corpus.length for corpus in corpora.values())
    return args.layout(length, tokenizer.pad_id, length if args.labels else None)


def _read(root: Path | None, args: TextArgs) -> tuple[Tokenizer, dict[Split, _Corpus]]:
    """The tokenizer, and the corpus of each split. Raises SpecError with every file that cannot be used."""
    tokenizer = tokenizer_named(args.tokenizer)
    train = _corpus(root, args, "file", tokenizer)
    return tokenizer, {
        "train": train,
        "val": train if args.val_file is None else _corpus(root, args, "val_file", tokenizer),
    }


def _corpus(root: Path | None, args: TextArgs, key: str, tokenizer: Tokenizer) -> _Corpus:
    where = f"data.args.{key}"
    path = asked_file(getattr(args, key), root, where)
    stamp = checked_file(path, where, SUFFIXES)
    special = args.special_tokens and not args.packed
    sequences = _tokenized(path, stamp, where, args.field, tokenizer, args.packed, special)
    if not sequences.tokens:
        raise SpecError([Problem(where, f"{path} holds no text", "give a file that does")])
    length = (args.length or 128) if args.packed else sequences.length(args.length, "data.args.length")
    return _Corpus(path, sequences, args.packed, length)


@lru_cache(maxsize=2)  # a data set is described before it is loaded; the stamp changes with the file
def _tokenized(
    path: Path, stamp: Stamp, where: str, field: str, tokenizer: Tokenizer, packed: bool, special: bool
) -> ReadSequences:
    found = ReadSequences(where)
    for number, text in _documents(path, where, field, packed):
        try:
            ids = list(tokenizer.encode(text, special=special, offsets=False).ids)
        except Exception as error:  # a tokenizer of a folder may raise anything
            what = f"{path} line {number} cannot be tokenized: {reason(error)}"
            raise SpecError([Problem(WHERE, what)]) from error
        if packed and path.suffix == ".jsonl" and tokenizer.separator is not None:
            ids.append(tokenizer.separator)
        if ids:
            found.append(ids, number)
    return found


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


TEXT = Text("text")
