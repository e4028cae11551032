"""lens.jsonl: the tokens that each part of a model predicts at each position of each sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import FailFast, Field

from hookrun.studies.kit.record_types import MOST_COUNT, Count, Name, OfSample, Text, TokenScore, read_records

if TYPE_CHECKING:
    from hookrun.studies.kit.files import Run

LENS = "lens.jsonl"

MOST_TOP = 1_000
"""Tokens that a line of lens.jsonl may name."""


class LensLine(OfSample):
    """A line of lens.jsonl: the tokens that a part of the model predicts at a position of a sample.

    layer: None if the part is before or after all layers
    top:   the tokens with the highest scores; for a contribution, probabilities are computed from its scores alone
    """

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


STREAMS = {LENS: LensLine}


def lens_of(run: Run) -> list[dict[str, Any]]:
    """`Run.lens`: the lines in order."""
    return read_records(run.path / LENS, LensLine)
