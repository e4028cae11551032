"""The continuations of prompts with and without hooks, and the probabilities of the first new token."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hookrun.studies.generate.records import (
    GENERATIONS,
    GenerationLine,
    differs,
    has_divergences,
    in_order,
    is_compared,
)
from hookrun.studies.kit.drawing import RunData, SampledLines, common, sampled

ID = "generations"
TITLE = "Generations"
POSITION = 40

MOST_BYTES = 8 * 2**20
"""Bytes read of generations.jsonl."""
MOST_OPEN = 8
"""Samples that are shown; more can be unfolded."""
MOST_SAMPLES = 64
MOST_PROMPT = 600
"""How many characters of a prompt are shown, from its end."""
MOST_PIECES = 400
"""How many tokens of a continuation are shown."""
MOST_TOKEN = 40
MOST_NEXT = 8

_WORDS = re.compile(r"\s*\S+\s*")


def read(folder: Path) -> SampledLines:
    """The lines of generations.jsonl: `facts.of_studies` has them."""
    return sampled(folder / GENERATIONS, GenerationLine, limit=MOST_BYTES)


def build(facts: RunData) -> dict[str, Any] | None:
    """The first samples and the others; `compared`: prompts were continued with and without hooks."""
    records = facts.of_studies[ID].records
    if not records:
        return None
    shown = in_order(records)[:MOST_SAMPLES]
    texts = {line["token"]: line["text"] for line in facts.tokens.records}
    samples = [_sample(record, texts) for record in shown]
    return {
        "samples": samples[:MOST_OPEN],
        "rest": samples[MOST_OPEN:],
        "total": len(records),
        "is_sample": facts.of_studies[ID].is_sample,
        "compared": has_divergences(records),
        "changed": sum(map(differs, records)),
    }


def _sample(record: Mapping[str, Any], texts: Mapping[int, str]) -> dict[str, Any]:
    """One sample. is_changed: the hooks changed the text or a probability, or there is nothing to compare it with."""
    pieces = _pieces(record["ids"], record["text"], texts)
    marks = [False] * len(pieces)
    without = None
    if is_compared(record):
        others = _pieces(record["ids_without"], record.get("text_without"), texts)
        marks, marks_of_others = changed_places(pieces, others)
        without = _continuation(others, marks_of_others, record["reason_without"])
    now = _continuation(pieces, marks, record["reason"])
    tokens = _next_tokens(record["next"], record.get("next_without") or [])
    is_changed = without is None or _has_marks(now) or _has_marks(without)
    for token in tokens:
        is_changed |= token["now"] != token["without"]
    return {
        "name": f"{record['split']} {record['sample']}",
        "kl": record.get("kl_first"),
        "prompt": _prompt(record),
        "now": now,
        "without": without,
        "next": tokens,
        "is_changed": is_changed,
    }


def _prompt(record: Mapping[str, Any]) -> str:
    """The end of the prompt."""
    prompt: str | None = record["prompt"]
    if prompt is None:
        prompt = " ".join(map(str, record["prompt_ids"][-MOST_PIECES:]))
    return prompt if len(prompt) <= MOST_PROMPT else f"…{prompt[-MOST_PROMPT:]}"


def _continuation(pieces: Sequence[str], marks: Sequence[bool], reason: str) -> dict[str, Any]:
    """The pieces with their marks, why it ended, and how many pieces are not shown."""
    shown = list(zip(pieces[:MOST_PIECES], marks, strict=False))
    return {"pieces": shown, "reason": reason, "left": max(len(pieces) - MOST_PIECES, 0)}


def _has_marks(continuation: Mapping[str, Any]) -> bool:
    return any(is_marked for _, is_marked in continuation["pieces"])


def _pieces(ids: Sequence[int], text: str | None, texts: Mapping[int, str]) -> list[str]:
    """The texts of the tokens if joining them, directly or with spaces, gives `text`; else the words of `text`."""
    if text is None:
        return [f"{token} " for token in ids]
    pieces = [texts.get(token, "") for token in ids]
    if "".join(pieces) == text:
        return pieces
    if " ".join(pieces) == text:
        return [f"{piece} " for piece in pieces]
    return _WORDS.findall(text[: 100 * MOST_PIECES])


def changed_places(one: Sequence[str], other: Sequence[str]) -> tuple[list[bool], list[bool]]:
    """For each piece of both sides, whether it differs from the other side.

    Sides of equal length are compared piece by piece; else all between the common start and end counts as changed.
    """
    if len(one) == len(other):
        marks = [piece != its_other for piece, its_other in zip(one, other, strict=True)]
        return marks, list(marks)
    start = common([one, other])
    end = min(common([one[::-1], other[::-1]]), len(one) - start, len(other) - start)
    return _marked_between(one, start, end), _marked_between(other, start, end)


def _marked_between(side: Sequence[str], start: int, end: int) -> list[bool]:
    """A mark for each piece; those of the first `start` and the last `end` are False."""
    marks = [False] * len(side)
    marks[start : len(side) - end] = [True] * (len(side) - start - end)
    return marks


Tokens = Sequence[Sequence[Any]]
"""Tokens, each with its text and its probability."""


def _next_tokens(now: Tokens, without: Tokens) -> list[dict[str, Any]]:
    """The tokens that are probable on either side, by the larger probability: as text, and as the width of a bar.

    A token that one list does not have is less probable than the last token of that list.
    """
    after = {token: _share(share) for token, _, share in now}
    before = {token: _share(share) for token, _, share in without}
    texts = {token: text for token, text, _ in [*now, *without]}
    by_share = sorted(texts, key=lambda token: -max(after.get(token, 0.0), before.get(token, 0.0)))
    tokens: list[dict[str, Any]] = []
    for token in by_share[:MOST_NEXT]:
        of_token = {
            "token": _token(token, texts[token]),
            "without": _percent(before.get(token), without) if without else "",
            "now": _percent(after.get(token), now),
            "share_without": before.get(token, 0.0),
            "share": after.get(token, 0.0),
        }
        tokens.append(of_token)
    return tokens


def _share(value: float) -> float:
    """A probability between 0 and 1, whatever a file says."""
    share = float(value)
    if math.isnan(share):
        return 0.0
    return min(max(share, 0.0), 1.0)


def _percent(share: float | None, tokens: Tokens) -> str:
    """A probability; None: that of a token which is not among the most probable ones, `tokens`."""
    if share is not None:
        return f"{share:.1%}"
    least = min((probability for *_, probability in tokens), default=0.0)
    return f"< {min(max(least, 0.001), 1.0):.1%}"


def _token(token: int, text: str | None) -> str:
    if not text:
        return f"#{token}"
    return repr(text if len(text) <= MOST_TOKEN else f"{text[:MOST_TOKEN]}…")
