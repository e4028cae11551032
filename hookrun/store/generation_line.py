"""A line of generations.jsonl as a typed model: its keys, types and bounds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, TypeAdapter

from hookrun.store.records import Count, Name, Record, Text

Tokens = Annotated[list[Count], FailFast(), Field(max_length=2**20)]
Probable = Annotated[
    list[Annotated[tuple[Count, Text | None, float], Field(strict=False)]], FailFast(), Field(max_length=100)
]
"""The most probable tokens: each with its text and its probability."""

Ending = Literal["length", "end"]


class GenerationLine(Record):
    """A line of generations.jsonl: the continuation of a prompt, and the one without hooks if both were generated.

    reason:   `length`: the limit on new tokens was reached; `end`: the last one is an end token
    next:     the most probable first new tokens
    kl_first: KL divergence of the first new token's distribution with hooks from that without, in nats
    """

    sample: Count
    split: Name
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


GENERATIONS_LINE: TypeAdapter[Any] = TypeAdapter(GenerationLine)
