"""From text to token ids and back: bytes, a list of words, or the tokenizer in a folder of transformers."""

from __future__ import annotations

import base64
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from time import thread_time
from typing import Any

from hookrun.errors import HookrunError, nearest, reason, refused_at, spec_error

BYTES = "bytes"
WHERE = "data.args.tokenizer"


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids, and for each the range of characters in the text, the end excluded.

    Tokens that are not a part of the text, such as a start token, have an empty range.

    open_ids: the ids without the special ones that the tokenizer puts behind a text, so that the text can go on
    """

    ids: Sequence[int]
    offsets: Sequence[tuple[int, int]]
    open_ids: Sequence[int]


class Tokenizer(ABC):
    """How a data set's text becomes token ids.

    vocab_size: the number of tokens; ids are smaller than this
    pad_id:     the id of padding; the attention mask says where it is
    separator:  the token between two documents; None where there is none
    """

    vocab_size: int
    pad_id: int = 0
    separator: int | None = None

    @abstractmethod
    def encode(self, text: str, *, special: bool = False, offsets: bool = True) -> Encoded:
        """The tokens of a text.

        special: add the special tokens around the sequence
        offsets: also compute the character ranges

        Raises ValueError for a text that it cannot encode.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens."""

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """The name of each token: its text, or what the tokenizer's own file calls it, as in ``Ġin``."""
        return [self.decode([each]) for each in ids]


class Bytes(Tokenizer):
    """A token for each byte of the text in UTF-8: 256 of them, and no special ones."""

    vocab_size = 256
    separator = ord("\n")

    def encode(self, text: str, *, special: bool = False, offsets: bool = True) -> Encoded:
        ids = text.encode()
        if not offsets:
            return Encoded(ids, (), ids)
        places = [(place, place + 1) for place, each in enumerate(text) for _ in each.encode()]
        return Encoded(ids, places, ids)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="backslashreplace")


@dataclass(frozen=True)
class Words(Tokenizer):
    """A token for each word of a list; in a text they are separated by spaces."""

    words: tuple[str, ...]
    _ids: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ids", {word: number for number, word in enumerate(self.words)})
        object.__setattr__(self, "vocab_size", len(self.words))

    def encode(self, text: str, *, special: bool = False, offsets: bool = True) -> Encoded:
        words = list(re.finditer(r"[^ ]+", text))
        ids = [self.id(word.group()) for word in words]
        return Encoded(ids, [word.span() for word in words], ids)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.words[each] for each in ids)

    def id(self, word: str) -> int:
        """The id of a word. Raises ValueError for one that is not in the list."""
        if word not in self._ids:
            raise ValueError(
                f"{word!r} is not one of the {len(self.words)} words; {nearest(word, self.words)}"
            )
        return self._ids[word]


class FromFolder(Tokenizer):
    """The tokenizer that transformers reads from a folder; no code of the folder runs."""

    def __init__(self, tokenizer: Any, growth: float) -> None:
        self._tokenizer = tokenizer
        self._growth = growth
        self._seconds_left = SECONDS
        self.vocab_size = max(len(tokenizer), max(tokenizer.get_vocab().values(), default=-1) + 1)
        pad = tokenizer.pad_token_id
        end = tokenizer.eos_token_id
        self.separator = end if isinstance(end, int) else None
        self.pad_id = pad if isinstance(pad, int) else self.separator or 0

    def encode(self, text: str, *, special: bool = False, offsets: bool = True) -> Encoded:
        size = len(text.encode())
        if size * self._growth > MOST_BYTES:
            times = f"the tokenizer may make its {size:,} bytes {self._growth:,.0f} times as many"
            raise ValueError(f"{times}, more than {MOST_BYTES:,}: break it into lines")
        if len(text) > TRIAL:  # judged before the library begins with a text that could take minutes
            self._call(text[:TRIAL], special, offsets)
        encoding = self._call(text, special, offsets)
        ids = encoding["input_ids"]
        mask = encoding["special_tokens_mask"]
        behind = 0 if all(mask) else sum(takewhile(bool, reversed(mask)))
        return Encoded(ids, encoding["offset_mapping"] if offsets else (), ids[: len(ids) - behind])

    def _call(self, text: str, special: bool, offsets: bool) -> Any:
        """What the library makes of a text. Raises ValueError if it takes too long; see SECONDS."""
        start = thread_time()
        with _panics_raised():
            encoding = self._tokenizer(
                text,
                add_special_tokens=special,
                return_offsets_mapping=offsets,
                return_special_tokens_mask=True,
            )
        took = thread_time() - start
        self._seconds_left += (100 + len(text)) * SECONDS_A_CHARACTER - took
        if self._seconds_left < 0:
            raise ValueError(
                f"{len(text):,} characters took {took:.2g} s: an expression in the tokenizer's file backtracks"
            )
        return encoding

    def decode(self, ids: Sequence[int]) -> str:
        with _panics_raised():
            return self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)

    def tokens(self, ids: Sequence[int]) -> list[str]:
        return [str(each) for each in self._tokenizer.convert_ids_to_tokens(list(ids))]


@contextmanager
def _panics_raised() -> Iterator[None]:
    """Turns a panic of the library in Rust, such as of a regular expression that backtracks, into a HookrunError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a BaseException, whose class cannot be imported
            raise
        raise HookrunError(f"the tokenizer failed: {reason(error)}") from error


SECONDS = 2.0
SECONDS_A_CHARACTER = 2e-5
TRIAL = 4096
"""Processor time that a tokenizer of a folder may take for all texts together: some twenty times what usual ones take,
with 100 characters more for each text; and the characters of a longer text that are encoded first. An expression that
backtracks takes 0.1 s for some twenty characters before the library ends it."""
MOST_BYTES = 2**27
"""Bytes that a text may have at worst after the tokenizer has normalized it; each of them takes 17 bytes of memory."""
MOST_GROWTH = 2**13
_GROWTH = {
    "NFC": 3,
    "NFD": 3,
    "NFKC": 11,
    "NFKD": 11,
    "Lowercase": 1.5,
    "BertNormalizer": 6,
    "ByteLevel": 2,
    "Metaspace": 3,
}
"""Type in tokenizer.json -> how many times as many bytes it makes of a text at most; of the others at most as many."""


def growth_of(file: Path) -> float:
    """How many times as many bytes the tokenizer makes of a text at most. Raises ValueError beyond MOST_GROWTH."""
    if not file.is_file():
        return 1
    content = json.loads(file.read_text(encoding="utf-8"))
    growth = _growth([content.get("normalizer"), content.get("pre_tokenizer")])
    added = sum(
        len(each["content"].encode()) for each in content.get("added_tokens") or ()
    )  # normalized as well
    if max(growth, _growth(content.get("decoder"))) > MOST_GROWTH or added * growth > MOST_BYTES:
        raise ValueError(f"{file.name} may make a text more than {MOST_GROWTH:,} times as long")
    return growth


def _growth(part: Any) -> float:
    match part:
        case list():
            return math.prod(map(_growth, part))
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if pattern:
            return max(1.0, len(content.encode()) / len(pattern.encode()))
        case {"type": "Replace", "content": str(added)} | {"type": "Prepend", "prepend": str(added)}:
            return 1 + len(added.encode())  # an expression may match before each character
        case {"type": "Precompiled", "precompiled_charsmap": str(packed)}:
            charsmap = base64.b64decode(packed)
            texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
            return max(1, *map(len, texts.split(b"\0")))
        case dict():
            return _GROWTH.get(part.get("type", ""), 1) * _growth(list(part.values()))
    return 1


_BYTES = Bytes()


def tokenizer_named(name: str) -> Tokenizer:
    """The tokenizer `bytes`, or that of a folder. Raises SpecError if the folder has no usable tokenizer."""
    if name == BYTES:
        return _BYTES
    folder = Path(name).expanduser().absolute()
    if not folder.is_dir():
        raise spec_error(
            WHERE,
            f"there is no folder {folder}",
            f"give the folder of a model or tokenizer of transformers, or {BYTES}",
        )
    stamp = tuple(sorted((each.name, each.stat().st_mtime_ns) for each in folder.glob("*.json")))
    return _from_folder(folder, stamp)


@lru_cache(maxsize=2)
def _from_folder(folder: Path, stamp: tuple[tuple[str, int], ...]) -> Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise spec_error(
            WHERE,
            "a tokenizer in a folder is read by transformers, which is not installed",
            "pip install 'hookrun[transformers]'",
        ) from error
    what = f"{folder} has no tokenizer that transformers can read: "
    hint = "save one there with tokenizer.save_pretrained(FOLDER)"
    # a damaged or unknown tokenizer may raise anything
    with refused_at(WHERE, hint, kinds=Exception, what=what, tell=reason):
        growth = growth_of(folder / "tokenizer.json")
        with _panics_raised():
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        fast = bool(tokenizer.is_fast)
        tokenizer.model_max_length = 10**12  # the data has a `length` of its own
        made = FromFolder(tokenizer, growth)
    if not fast:
        raise spec_error(
            WHERE,
            f"the tokenizer in {folder} does not say which characters its tokens stand for",
            "save it as a fast one, which has a tokenizer.json",
        )
    return made
