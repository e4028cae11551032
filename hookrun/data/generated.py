"""Data sets that hookrun makes itself: names in sentences, repeated tokens, modular sums, images of noise."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hookrun.data.info import DataInfo, Split, TensorInfo
from hookrun.data.samples import IGNORED, Sample, Samples
from hookrun.data.source import Generated, Source, part_of, val_count
from hookrun.data.tokenizer import Words
from hookrun.data.tokens import (
    MOST_LENGTH,
    GeneratedTokens,
    PaddingArgs,
    TokenSamples,
    TokenSequence,
    next_tokens,
)
from hookrun.errors import spec_error

LENGTH = 4
SPANS = {"a": (0, 1), "b": (2, 3)}


class ModularAddition(Source, PaddingArgs):
    """`a + b =`, four tokens, with the target (a + b) mod `modulus` at the last; a number is its own id.

    modulus:      the numbers are below it
    val_fraction: the fixed fraction of all pairs that is for validation
    """

    name = "modular_addition"
    modulus: int = Field(default=113, ge=2, le=1000)
    val_fraction: float = Field(default=0.7, ge=0, le=1)

    def inspect(self, root: Path | None, split: Split) -> DataInfo:
        held_out = val_count(self.modulus**2, self.val_fraction)
        sizes: dict[Split, int | None] = {"train": self.modulus**2 - held_out, "val": held_out}
        if sizes[split] == 0:
            raise spec_error(
                "data.args.val_fraction",
                f"no pair is for the split '{split}' (val_fraction {self.val_fraction})",
                "set it between 0 and 1",
            )
        words = Words((*map(str, range(self.modulus)), "+", "="))
        return self.layout(LENGTH).describe(self.name, sizes, words, list(SPANS))

    def open(self, root: Path | None, split: Split, seed: int) -> Samples:
        self.inspect(root, split)
        pairs = torch.tensor(part_of(self.modulus**2, self.val_fraction, split))
        return TokenSamples(self.layout(LENGTH), len(pairs), partial(self._sum, pairs), list(SPANS))

    def _sum(self, pairs: Tensor, number: int) -> TokenSequence:
        a, b = divmod(int(pairs[number]), self.modulus)
        ids = torch.tensor([a, self.modulus, b, self.modulus + 1])
        targets = torch.tensor([IGNORED, IGNORED, IGNORED, (a + b) % self.modulus])
        return TokenSequence(ids, targets, spans=SPANS)


START = 0


class RepeatedTokens(GeneratedTokens):
    """Token 0 starts every sample; then come `half` different tokens, drawn for each sample, and the same again.

    Within a half no token comes twice, so that each token of the second half but the first is certain.

    vocab_size: how many tokens there are, token 0 included
    half:       [least, most] tokens of the sequence that is repeated
    predict:    second_half: the targets are the tokens of the repetition that can be predicted; all: every next token,
                also those of the first half, which cannot be predicted
    """

    name = "repeated_tokens"
    spans = ("first", "second")
    vocab_size: int = Field(default=64, ge=3, le=2**20)
    half: list[int] = Field(default=[8, 24], min_length=2, max_length=2)
    predict: Literal["second_half", "all"] = "second_half"

    @model_validator(mode="after")
    def _halves_fit(self) -> RepeatedTokens:
        least, most = self.half
        if not 2 <= least <= most <= MOST_LENGTH // 2 - 1:
            raise ValueError(f"`half` is [{least}, {most}], expected [least, most] with 2 <= least <= most")
        if most >= self.vocab_size:
            raise ValueError(
                f"{most} different tokens do not fit into vocab_size {self.vocab_size}, of which one is the start"
            )
        return self

    @property
    def longest(self) -> int:
        return 1 + 2 * self.half[1]

    @property
    def tokenizer(self) -> Words:
        return Words(("start", *map(str, range(1, self.vocab_size))))

    def draw(self, generator: torch.Generator) -> TokenSequence:
        least, most = self.half
        count = int(torch.randint(least, most + 1, (), generator=generator))
        half = 1 + torch.randperm(self.vocab_size - 1, generator=generator)[:count]
        ids = torch.cat([torch.tensor([START]), half, half])
        targets = next_tokens(ids)
        if self.predict == "second_half":
            targets[: count + 1] = IGNORED  # where the repetition begins cannot be known
        spans = {"first": (1, 1 + count), "second": (1 + count, 1 + 2 * count)}
        return TokenSequence(ids, targets, spans=spans)


NAMES_USED = (
    *("Alice", "Anna", "Ben", "Carl", "Clara", "David", "Emma", "Eric", "Frank", "Grace", "Helen", "Henry"),
    *("Jack", "James", "John", "Julia", "Kate", "Laura", "Leo", "Lucy", "Mark", "Mary", "Max", "Nina"),
    *("Oliver", "Paul", "Peter", "Rose", "Sarah", "Simon", "Tom", "Victor"),
)
_PLACES = ("store", "park", "school", "station", "office", "garden", "beach", "library")
_THINGS = ("book", "drink", "letter", "ring", "ball", "flower", "map", "cake")
# A and B are the two names in order of their first occurrence, S is the repeated one; the other is the answer.
TEMPLATES = (
    "When A and B went to the PLACE , S gave a THING to",
    "Then A and B went to the PLACE . S gave a THING to",
    "After A and B had been at the PLACE , S handed a THING to",
    "While A and B were working at the PLACE , S offered a THING to",
    "Friends A and B found a THING at the PLACE . S gave it to",
)
_SLOTS = {"A", "B", "S", "PLACE", "THING"}
_WORDS = Words(
    (
        *dict.fromkeys(word for text in TEMPLATES for word in text.split() if word not in _SLOTS),
        *_PLACES,
        *_THINGS,
        *NAMES_USED,
    )
)


class NameSentences(GeneratedTokens):
    """`When Mary and John went to the store , John gave a book to`: the target at the last token is `Mary`.

    The wrong answer is the repeated name. Spans: `io` and `subject` are the first occurrences of the answer and of the
    other name, `subject2` is the repeated name.

    form: clean: as in the templates; swapped: the other name is repeated, so that the answer would be the wrong one;
          other: two other names. In every form target and wrong answer are those of the clean sentence, and sample i
          has the same length, so that activations can be patched position by position
    """

    name = "names"
    spans = ("io", "subject", "subject2")
    has_wrong = True
    form: Literal["clean", "swapped", "other"] = "clean"

    @property
    def longest(self) -> int:
        return max(len(text.split()) for text in TEMPLATES)

    @property
    def tokenizer(self) -> Words:
        return _WORDS

    def draw(self, generator: torch.Generator) -> TokenSequence:
        def below(count: int) -> int:
            return int(torch.randint(count, (), generator=generator))

        template = TEMPLATES[below(len(TEMPLATES))].split()
        drawn = torch.randperm(len(NAMES_USED), generator=generator)[:4].tolist()
        answer, wrong, third, fourth = [NAMES_USED[place] for place in drawn]
        answer_slot, wrong_slot = ("A", "B") if below(2) else ("B", "A")
        slots = {"PLACE": _PLACES[below(len(_PLACES))], "THING": _THINGS[below(len(_THINGS))]}
        slots[answer_slot] = third if self.form == "other" else answer
        slots[wrong_slot] = fourth if self.form == "other" else wrong
        slots["S"] = slots[answer_slot if self.form == "swapped" else wrong_slot]
        ids = torch.tensor([_WORDS.id(slots.get(word, word)) for word in template])
        targets = torch.full((len(ids),), IGNORED)
        targets[-1] = _WORDS.id(answer)
        spans: dict[str, tuple[int, int]] = {}
        for name, slot in zip(self.spans, (answer_slot, wrong_slot, "S"), strict=True):
            start = template.index(slot)
            spans[name] = (start, start + 1)
        return TokenSequence(ids, targets, spans=spans, wrong=_WORDS.id(wrong))


Side = Annotated[int, Field(ge=1, le=2**14)]


class FakeImages(Generated):
    """Images uniform in 0..1, each drawn from a seed of its own: sample i is always the same.

    shape:       [C, H, W] of an image
    num_classes: the number of labels
    """

    name = "fake_images"
    train_size: int = Field(default=1000, ge=0, le=10**9)
    val_size: int = Field(default=200, ge=0, le=10**9)
    shape: list[Side] = Field(default=[3, 64, 64], min_length=3, max_length=3)
    num_classes: int = Field(default=10, ge=1, le=2**20)

    def inspect(self, root: Path | None, split: Split) -> DataInfo:
        self.size(split)
        return DataInfo(
            name=self.name,
            inputs=TensorInfo(tuple(self.shape), torch.float32),
            target=TensorInfo((), torch.int64),
            num_classes=self.num_classes,
            sizes=self.sizes,
        )

    def open(self, root: Path | None, split: Split, seed: int) -> Samples:
        return Samples(self.size(split), partial(self._drawn, split, seed))

    def _drawn(self, split: Split, seed: int, number: int) -> Sample:
        generator = self.generator(split, seed, number)
        image = torch.rand(tuple(self.shape), generator=generator)
        return image, torch.randint(self.num_classes, (), generator=generator)
