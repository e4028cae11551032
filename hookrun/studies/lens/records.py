"""lens.jsonl: the tokens that each part of a model predicts at each position of each sample."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import FailFast, Field

from hookrun.studies.kit.record_types import (
    MOST_COUNT,
    Count,
    Name,
    OfSample,
    Text,
    TokenScore,
    each_record,
)

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
    return list(each_record(run.path / LENS, LensLine))


def answer_of(run: Run) -> dict[str, Any] | None:
    """The most likely tokens by layer, at the last position of the first sample; None if no line has tokens."""
    lines = each_record(run.path / LENS, LensLine)
    first = next(lines, None)
    if first is None:
        return None
    place = {key: first[key] for key in ("split", "sample")}
    of_sample = [first, *takewhile(lambda line: line.items() >= place.items(), lines)]
    last = max(line["position"] for line in of_sample)
    layers: list[dict[str, Any]] = []
    for line in of_sample:
        if line["position"] == last and line["top"]:
            layer = {key: line[key] for key in _OF_A_LAYER if line.get(key) is not None}
            layers.append({**layer, "top": line["top"][:MOST_ANSWERED]})
    return {"what": "top_tokens", **place, "position": last, "layers": layers} if layers else None


_OF_A_LAYER = ("part", "kind", "layer", "head", "logit_difference")
MOST_ANSWERED = 3
"""Tokens of a layer in the answer."""
