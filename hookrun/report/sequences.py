"""The sequences of tokens that went through the model, as far as a run kept them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sequence:
    """The tokens of one sample.

    ids:     without its padding
    before:  how many tokens of padding stood before them
    width:   of the batch: padding included
    targets: the token that was to be predicted at each; None: none was
    texts:   token -> what to call it
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
        """What to call a token: its number where its text is not known."""
        return self.texts.get(token) or f"#{token}"

    @property
    def names(self) -> list[str]:
        """What to call each of its tokens."""
        return [self.name(each) for each in self.ids]
