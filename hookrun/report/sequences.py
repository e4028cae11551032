"""The token sequences that went through the model, if a run recorded them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sequence:
    """The tokens of one sample.

    ids:     its tokens, without padding
    before:  number of padding tokens before them
    width:   length of the batch's sequences, including padding
    targets: the target token at each position; None: no target
    texts:   token -> its text
    """

    ids: tuple[int, ...]
    before: int
    width: int
    targets: tuple[int | None, ...]
    texts: Mapping[int, str]

    @classmethod
    def of(cls, line: Mapping[str, Any], texts: Mapping[int, str]) -> Sequence:
        """From a line of samples.jsonl that has tokens."""
        ids = tuple(line["tokens"])
        before, after = line.get("padding", (0, 0))
        targets = tuple(line.get("targets") or ())
        known = targets if len(targets) == len(ids) else (None,) * len(ids)
        return cls(ids, before, before + len(ids) + after, known, texts)

    def name(self, token: int) -> str:
        """The text of a token, or its number if the text is not known."""
        return self.texts.get(token) or f"#{token}"

    @property
    def names(self) -> list[str]:
        """The name of each of its tokens."""
        return [self.name(each) for each in self.ids]
