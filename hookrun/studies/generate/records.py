"""generations.jsonl: how each prompt was continued."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import FailFast, Field

from hookrun.studies.kit.record_types import Count, OfSample, Text, TokenScore, read_records

if TYPE_CHECKING:
    from hookrun.studies.kit.files import Run

GENERATIONS = "generations.jsonl"

Tokens = Annotated[list[Count], FailFast(), Field(max_length=2**20)]
Probable = Annotated[list[TokenScore], FailFast(), Field(max_length=100)]
"""The most probable tokens: each with its text and its probability."""

Ending = Literal["length", "end"]


class GenerationLine(OfSample):
    """A line of generations.jsonl: the continuation of a prompt, and the one without hooks if both were generated.

    reason:   `length`: the limit on new tokens was reached; `end`: the last one is an end token
    next:     the most probable first new tokens
    kl_first: KL divergence of the first new token's distribution with hooks from that without, in nats
    """

    prompt: Text | None
    prompt_ids: Tokens
    text: Text | None
    ids: Tokens
    reason: Ending
    next: Probable
    text_without: Text | None = None
    ids_without: Tokens = []
    reason_without: Ending | None = None
    next_without: Probable = []
    kl_first: float | None = None


STREAMS = {GENERATIONS: GenerationLine}


def generations_of(run: Run) -> list[dict[str, Any]]:
    """`Run.generations`: the lines in the order of the samples."""
    return read_records(run.path / GENERATIONS, GenerationLine)


def predictions_to_compare(run: Run) -> dict[tuple[str, int], str]:
    """(split, sample) -> the text that was generated, by which two runs are compared."""
    texts: dict[tuple[str, int], str] = {}
    for line in run.generations:
        texts[line["split"], line["sample"]] = line["text"] or str(line["ids"])
    return texts


def in_order(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines in their order; if first tokens were compared, those that the hooks change most come first."""
    return sorted(records, key=_order) if has_divergences(records) else list(records)


def has_divergences(records: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the first tokens were compared with those without hooks."""
    return any(record.get("kl_first") is not None for record in records)


def _order(record: Mapping[str, Any]) -> tuple[float, bool]:
    """A sort key: the largest change first; a KL that is not a number comes last."""
    kl = record.get("kl_first") or 0.0
    return (0.0 if math.isnan(kl) else -kl, not differs(record))


def differs(record: Mapping[str, Any]) -> bool:
    """Whether the hooks changed the continuation."""
    return is_compared(record) and record["ids"] != record["ids_without"]


def is_compared(record: Mapping[str, Any]) -> bool:
    """Whether the prompt was also continued without hooks."""
    return isinstance(record.get("ids_without"), list) and record.get("reason_without") is not None


def answer_of(run: Run) -> dict[str, Any] | None:
    """The continuations in the order of the page, and how many of them the hooks changed.

    None if nothing was generated. `changed` is None if the prompts were not continued without hooks too.
    """
    records = run.generations
    if not records:
        return None
    rows = [{key: record.get(key) for key in _ANSWERED} for record in in_order(records)]
    changed = sum(map(differs, records)) if any(map(is_compared, records)) else None
    return {"what": "continuations", "changed": changed, "continuations": rows}


_ANSWERED = ("split", "sample", "prompt", "text", "ids", "text_without", "ids_without", "kl_first")
