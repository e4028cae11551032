"""The continuations of prompts with and without hooks, and the probabilities of the first new token."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hookrun.report.facts import Facts
from hookrun.report.lines import sampled
from hookrun.report.section import ReportSection
from hookrun.store.format import TOKENS
from hookrun.store.records import TokenLine

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


@dataclass(frozen=True)
class Piece:
    """A token of a continuation, or a word if tokens have no texts. changed: it differs from the other side."""

    text: str
    changed: bool = False


@dataclass(frozen=True)
class Continuation:
    """A continuation. pieces: what was generated; reason: why it ended; left: how many pieces are not shown."""

    pieces: Sequence[Piece]
    reason: str
    left: int


@dataclass(frozen=True)
class NextToken:
    """A possible first new token: its probability without and with hooks, as text and as the width of a bar."""

    token: str
    without: str
    now: str
    share_without: float
    share: float


@dataclass(frozen=True)
class Generated:
    """One sample."""

    name: str
    kl: float | None
    prompt: str
    now: Continuation
    without: Continuation | None
    next: Sequence[NextToken]

    @property
    def is_changed(self) -> bool:
        """Whether the hooks changed the continuation or a probability, or there is nothing to compare it with."""
        if self.without is None:
            return True
        pieces = [*self.now.pieces, *self.without.pieces]
        return any(each.changed for each in pieces) or any(each.now != each.without for each in self.next)


@dataclass(frozen=True)
class Generations:
    """The data of the section. compared: prompts were continued with and without hooks."""

    samples: Sequence[Generated]
    rest: Sequence[Generated]
    total: int
    is_sample: bool
    compared: bool
    changed: int


def _generations(facts: Facts) -> Generations | None:
    records = facts.generations.records
    if not records:
        return None
    compared = any(record.get("kl_first") is not None for record in records)
    changed = sum(_differs(record) for record in records)
    ordered = sorted(records, key=_order) if compared else records
    shown = ordered[:MOST_SAMPLES]
    texts = _texts(facts, shown)
    made = [_generated(record, texts) for record in shown]
    few, rest = made[:MOST_OPEN], made[MOST_OPEN:]
    return Generations(few, rest, len(records), facts.generations.is_sample, compared, changed)


def _order(record: Mapping[str, Any]) -> tuple[float, bool]:
    """A sort key: the largest change first; a KL that is not a number comes last."""
    kl = record.get("kl_first") or 0.0
    return (-kl if kl == kl else 0.0, not _differs(record))


def _differs(record: Mapping[str, Any]) -> bool:
    return _is_compared(record) and record["ids"] != record["ids_without"]


def _is_compared(record: Mapping[str, Any]) -> bool:
    return isinstance(record.get("ids_without"), list) and record.get("reason_without") is not None


def _texts(facts: Facts, records: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Token -> text, of the tokens that the records have."""
    met = {token for record in records for token in [*record["ids"], *(record.get("ids_without") or [])]}
    lines = sampled(facts.path / TOKENS, TokenLine).records
    return {line["token"]: line["text"] for line in lines if line["token"] in met}


def _generated(record: Mapping[str, Any], texts: Mapping[int, str]) -> Generated:
    now = _pieces(record["ids"], record["text"], texts)
    without = None
    marks = [False] * len(now)
    if _is_compared(record):
        other = _pieces(record["ids_without"], record.get("text_without"), texts)
        marks, marks_without = changed_places(now, other)
        without = _continuation(other, marks_without, record["reason_without"])
    prompt = record["prompt"]
    if prompt is None:
        prompt = " ".join(map(str, record["prompt_ids"][-MOST_PIECES:]))
    return Generated(
        name=f"{record['split']} {record['sample']}",
        kl=record.get("kl_first"),
        prompt=prompt if len(prompt) <= MOST_PROMPT else f"…{prompt[-MOST_PROMPT:]}",
        now=_continuation(now, marks, record["reason"]),
        without=without,
        next=_next(record["next"], record.get("next_without") or []),
    )


def _continuation(pieces: Sequence[str], marks: Sequence[bool], reason: str) -> Continuation:
    shown = [Piece(text, mark) for text, mark in zip(pieces[:MOST_PIECES], marks, strict=False)]
    return Continuation(shown, reason, max(len(pieces) - MOST_PIECES, 0))


def _pieces(ids: Sequence[int], text: str | None, texts: Mapping[int, str]) -> list[str]:
    """The texts of the tokens if joining them, directly or with spaces, gives `text`; else the words of `text`."""
    if text is None:
        return [f"{token} " for token in ids]
    known = [texts.get(token, "") for token in ids]
    if "".join(known) == text:
        return known
    if " ".join(known) == text:
        return [f"{each} " for each in known]
    return _WORDS.findall(text[: 100 * MOST_PIECES])


def changed_places(one: Sequence[str], other: Sequence[str]) -> tuple[list[bool], list[bool]]:
    """For each piece of both sides, whether it differs from the other side.

    Sides of equal length are compared piece by piece; else all between the common start and end counts as changed.
    """
    start = next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    left = min(len(one), len(other)) - start
    pairs = zip(reversed(one), reversed(other), strict=False)
    end = min(next((n for n, (a, b) in enumerate(pairs) if a != b), left), left)
    if len(one) == len(other):
        marks = [a != b for a, b in zip(one, other, strict=True)]
        return marks, list(marks)
    return _middle(len(one), start, end), _middle(len(other), start, end)


def _middle(count: int, start: int, end: int) -> list[bool]:
    return [start <= place < count - end for place in range(count)]


def _next(now: Sequence[Sequence[Any]], without: Sequence[Sequence[Any]]) -> list[NextToken]:
    """The tokens that are probable on either side, by the larger probability.

    A token that one list does not have is less probable than the last token of that list.
    """
    after, before = ({each[0]: each for each in side} for side in (now, without))
    least_after, least_before = (min((each[2] for each in side), default=0.0) for side in (now, without))
    tokens = sorted(after | before, key=lambda token: -max(_p(after, token), _p(before, token)))
    found = []
    for token in tokens[:MOST_NEXT]:
        text = (after.get(token) or before[token])[1]
        found.append(
            NextToken(
                token=_token(token, text),
                without=_percent(before, token, least_before) if without else "",
                now=_percent(after, token, least_after),
                share_without=_p(before, token),
                share=_p(after, token),
            )
        )
    return found


def _p(side: Mapping[int, Sequence[Any]], token: int) -> float:
    """A probability between 0 and 1, whatever a file says."""
    value = float(side[token][2]) if token in side else 0.0
    return min(max(value, 0.0), 1.0) if value == value else 0.0


def _percent(side: Mapping[int, Sequence[Any]], token: int, least: float) -> str:
    return f"{_p(side, token):.1%}" if token in side else f"< {min(max(least, 0.001), 1.0):.1%}"


def _token(token: int, text: str | None) -> str:
    if not text:
        return f"#{token}"
    return repr(text if len(text) <= MOST_TOKEN else f"{text[:MOST_TOKEN]}…")


SECTION = ReportSection("generations", "Generations", _generations, "generations.html")
