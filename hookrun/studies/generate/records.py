"""generations.jsonl: how each prompt was continued."""

from __future__ import annotations

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
    texts = dict[tuple[str, int], str]()
    for line in run.generations:
        texts[line["split"], line["sample"]] = line["text"] or str(line["ids"])
    return texts
