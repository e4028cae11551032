"""Sentences with two names and an indirect object, from templates (Wang et al. 2022, arXiv:2211.00593)."""

from __future__ import annotations

from typing import Literal

import torch

from hookrun.data.samples import IGNORED
from hookrun.data.tokenizer import Words
from hookrun.data.tokens import GeneratedTokens, TokenSequence

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
        io, subject, third, fourth = (
            NAMES_USED[place] for place in torch.randperm(len(NAMES_USED), generator=generator)[:4].tolist()
        )
        io_first = bool(below(2))
        slots = {"PLACE": _PLACES[below(len(_PLACES))], "THING": _THINGS[below(len(_THINGS))]}
        shown = (third, fourth) if self.form == "other" else (io, subject)
        slots |= dict(zip("AB" if io_first else "BA", shown, strict=True))
        slots["S"] = shown[0 if self.form == "swapped" else 1]
        ids = torch.tensor([_WORDS.id(slots.get(word, word)) for word in template])
        targets = torch.full((len(ids),), IGNORED)
        targets[-1] = _WORDS.id(io)
        places = {slot: template.index(slot) for slot in "ABS"}
        firsts = (places["A"], places["B"]) if io_first else (places["B"], places["A"])
        starts = dict(zip(self.spans, (*firsts, places["S"]), strict=True))
        spans = {name: (start, start + 1) for name, start in starts.items()}
        return TokenSequence(ids, targets, spans=spans, wrong=_WORDS.id(subject))
