"""The lines of lens.jsonl: the next-token prediction of a part of a language model at a position of a sample."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, TypeAdapter

from hookrun.store.records import MOST_COUNT, Count, Name, Record, Text

MOST_TOP = 1_000
"""Tokens that a line of lens.jsonl may name."""

TokenScore = Annotated[tuple[Count, Text | None, float], Field(strict=False)]
"""Id, text and probability of a token."""


class LensLine(Record):
    """A line of lens.jsonl: the prediction of a part of the model at a position of a sample.

    layer: None: before or after all layers
    top:   the tokens with the highest scores; a contribution's probabilities are computed from its own scores alone
    """

    sample: Count
    split: Name
    part: Name
    kind: Literal["residual", "layers", "heads"]
    layer: Count | None
    head: Count | None = None
    position: Count
    token: Annotated[int, Field(ge=-1, le=MOST_COUNT)]
    text: Text | None
    top: Annotated[list[TokenScore], Field(max_length=MOST_TOP), FailFast()]
    answer_logit: float | None = None
    wrong_logit: float | None = None
    logit_difference: float | None = None
    kl_to_output: float | None = None


LENS_LINE: TypeAdapter[Any] = TypeAdapter(LensLine)
