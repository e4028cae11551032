"""The continuations of prompts with and without hooks, and the probabilities of the first new token."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hookrun.studies.generate.records import GENERATIONS, GenerationLine
from hookrun.studies.kit.drawing import Facts, SampledLines, common, sampled

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


def build(facts: Facts) -> dict[str, Any] | None:
    """The first samples and the others; `compared`: prompts were continued with and without hooks."""
    records = facts.of_studies[ID].records
    if not records:
        return None
    compared = any(record.get("kl_first") is not None for record in records)
    shown = (sorted(records, key=_order) if compared else records)[:MOST_SAMPLES]
    texts = {line["token"]: line["text"] for line in facts.tokens.records}
    samples = [_sample(record, texts) for record in shown]
    return {
        "samples": samples[:MOST_OPEN],
        "rest": samples[MOST_OPEN:],
        "total": len(records),
        "is_sample": facts.of_studies[ID].is_sample,
        "compared": compared,
        "changed": sum(map(_differs, records)),
    }


def _order(record: Mapping[str, Any]) -> tuple[float, bool]:
    """A sort key: the largest change first; a KL that is not a number comes last."""
    kl = record.get("kl_first") or 0.0
    return (-kl if kl == kl else 0.0, not _differs(record))


def _differs(record: Mapping[str, Any]) -> bool:
    return _is_compared(record) and record["ids"] != record["ids_without"]


def _is_compared(record: Mapping[str, Any]) -> bool:
    return isinstance(record.get("ids_without"), list) and record.get("reason_without") is not None


def _sample(record: Mapping[str, Any], texts: Mapping[int, str]) -> dict[str, Any]:
    """One sample. is_changed: the hooks changed the text or a probability, or there is nothing to compare it with."""
    pieces, without = _pieces(record["ids"], record["text"], texts), None
    marks = [False] * len(pieces)
    if _is_compared(record):
        other = _pieces(record["ids_without"], record.get("text_without"), texts)
        marks, marks_without = changed_places(pieces, other)
        without = _continuation(other, marks_without, record["reason_without"])
    prompt = record["prompt"]
    if prompt is None:
        prompt = " ".join(map(str, record["prompt_ids"][-MOST_PIECES:]))
    now = _continuation(pieces, marks, record["reason"])
    tokens = _next(record["next"], record.get("next_without") or [])
    marked = [changed for side in (now, without) if side is not None for _, changed in side["pieces"]]
    return {
        "name": f"{record['split']} {record['sample']}",
        "kl": record.get("kl_first"),
        "prompt": prompt if len(prompt) <= MOST_PROMPT else f"…{prompt[-MOST_PROMPT:]}",
        "now": now,
        "without": without,
        "next": tokens,
        "is_changed": without is None
        or any(marked)
        or any(token["now"] != token["without"] for token in tokens),
    }


def _continuation(pieces: Sequence[str], marks: Sequence[bool], reason: str) -> dict[str, Any]:
    """The pieces with their marks, why it ended, and how many pieces are not shown."""
    return {
        "pieces": list(zip(pieces[:MOST_PIECES], marks, strict=False)),
        "reason": reason,
        "left": max(len(pieces) - MOST_PIECES, 0),
    }


def _pieces(ids: Sequence[int], text: str | None, texts: Mapping[int, str]) -> list[str]:
    """The texts of the tokens if joining them, directly or with spaces, gives `text`; else the words of `text`."""
    if text is None:
        return [f"{token} " for token in ids]
    known = [texts.get(token, "") for token in ids]
    if "".join(known) == text:
        return known
    if " ".join(known) == text:
        return [f"{piece} " for piece in known]
    return _WORDS.findall(text[: 100 * MOST_PIECES])


def changed_places(one: Sequence[str], other: Sequence[str]) -> tuple[list[bool], list[bool]]:
    """For each piece of both sides, whether it differs from the other side.

    Sides of equal length are compared piece by piece; else all between the common start and end counts as changed.
    """
    if len(one) == len(other):
        marks = [a != b for a, b in zip(one, other, strict=True)]
        return marks, list(marks)
    start = common([one, other])
    end = min(common([one[::-1], other[::-1]]), len(one) - start, len(other) - start)
    marks, marks_other = ([start <= at < len(side) - end for at in range(len(side))] for side in (one, other))
    return marks, marks_other


def _next(now: Sequence[Sequence[Any]], without: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """The tokens that are probable on either side, by the larger probability: as text, and as the width of a bar.

    A token that one list does not have is less probable than the last token of that list.
    """
    after, before = ({token: _share(share) for token, _, share in side} for side in (now, without))
    least_after, least_before = (min((share for *_, share in side), default=0.0) for side in (now, without))
    texts = {token: text for token, text, _ in [*now, *without]}
    tokens = sorted(texts, key=lambda token: -max(after.get(token, 0.0), before.get(token, 0.0)))
    return [
        {
            "token": _token(token, texts[token]),
            "without": _percent(before.get(token), least_before) if without else "",
            "now": _percent(after.get(token), least_after),
            "share_without": before.get(token, 0.0),
            "share": after.get(token, 0.0),
        }
        for token in tokens[:MOST_NEXT]
    ]


def _share(value: float) -> float:
    """A probability between 0 and 1, whatever a file says."""
    return min(max(float(value), 0.0), 1.0) if value == value else 0.0


def _percent(share: float | None, least: float) -> str:
    return f"< {min(max(least, 0.001), 1.0):.1%}" if share is None else f"{share:.1%}"


def _token(token: int, text: str | None) -> str:
    if not text:
        return f"#{token}"
    return repr(text if len(text) <= MOST_TOKEN else f"{text[:MOST_TOKEN]}…")
