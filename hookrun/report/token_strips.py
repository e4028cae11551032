"""Token strips: the tokens of the first samples, coloured by what was captured or predicted at each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from markupsafe import Markup

from hookrun.report.draw.charts import Figure, Table
from hookrun.report.draw.pictures import shaded, worded
from hookrun.report.draw.text import number, one_line
from hookrun.report.facts import Facts, TokenSequence
from hookrun.report.sampling import CapturedRows, rows_of_samples
from hookrun.store.captures.read import StoredCapture

MOST_SAMPLES = 4
MOST_TOKENS = 192
"""The largest number of tokens of one sample."""


def strips_of_capture(capture: StoredCapture, facts: Facts) -> list[Figure]:
    """Strips of a capture with `tokens`: its value at each token, or the norm of its values; none for other captures.

    Raises HookrunError for a shard that can't be read.
    """
    found = list[Strip]()
    for rows in rows_of_samples(capture, MOST_SAMPLES, facts.sequences, MOST_TOKENS):
        if not rows.by_token or (rows.keys >= 0).any() or not rows.values[0].numel():
            return []
        found.append(_of_values(rows, facts))
    if max((len(each.tokens) for each in found), default=0) < 2:
        return []
    is_one = found and torch.Size(capture.shape[1:]).numel() == 1
    what = "value" if is_one else "norm"
    note = "each token has the colour of " + ("the value" if is_one else "the norm of the values") + " there"
    return [
        strips(
            f"{what} at each token",
            found,
            what=what,
            note=note,
            ends=("low", "high") if is_one else ("small", "large"),
        )
    ]


def _of_values(rows: CapturedRows, facts: Facts) -> Strip:
    flat = rows.values.reshape(len(rows.values), -1)
    values = flat[:, 0] if flat.shape[1] == 1 else torch.linalg.vector_norm(flat, dim=1)
    ids = rows.token_ids.tolist()
    names = [facts.texts.get(each) or (f"#{each}" if each >= 0 else "?") for each in ids]
    return Strip(rows.name, names, rows.positions.tolist(), values.tolist())


def strips_of_predictions(capture: StoredCapture, facts: Facts) -> list[Figure]:
    """Strips of logits [tokens, vocabulary]: loss and probability of the target at each token; none for others.

    Raises HookrunError for a shard that can't be read.
    """
    shape = capture.shape[1:]
    if len(shape) != 2 or facts.has_encoder or not facts.sequences:
        return []
    losses, chances = list[Strip](), list[Strip]()
    for rows in rows_of_samples(capture, MOST_SAMPLES, facts.sequences, 1):
        sequence = facts.sequences.get(rows.sample)
        if sequence is None or shape[0] != sequence.width or not _fit(sequence, shape[1]):
            continue
        scores = rows.values[0][sequence.before :][: len(sequence.ids)][:MOST_TOKENS]
        if found := _logs(scores, sequence):
            losses.append(_of_targets(rows, sequence, {place: -log for place, log in found.items()}))
            chances.append(
                _of_targets(rows, sequence, {place: math.exp(log) for place, log in found.items()})
            )
    if not losses:
        return []
    note = "of the target at each token, for language models the next token; tokens without a target have no colour"
    return [
        strips(
            "loss at each token",
            losses,
            what="loss",
            note=f"the loss {note}",
            ends=("expected", "surprising"),
            heads=("target",),
        ),
        strips(
            "probability at each token",
            chances,
            what="probability",
            note=f"the probability {note}",
            ends=("unlikely", "likely"),
            heads=("target",),
        ),
    ]


def _fit(sequence: TokenSequence, vocabulary: int) -> bool:
    return all(each is None or each < vocabulary for each in sequence.targets)


def _logs(scores: torch.Tensor, sequence: TokenSequence) -> dict[int, float]:
    """Position -> the logarithm of the target's probability, for positions with a target."""
    places = [place for place, each in enumerate(sequence.targets[: len(scores)]) if each is not None]
    if not places:
        return {}
    targets = torch.tensor([sequence.targets[place] for place in places])
    logs = scores[places].double().log_softmax(-1)
    return dict(zip(places, logs[torch.arange(len(places)), targets].tolist(), strict=True))


def _of_targets(rows: CapturedRows, sequence: TokenSequence, values: dict[int, float]) -> Strip:
    shown = min(len(sequence.ids), MOST_TOKENS)
    targets = [sequence.name(each) if each is not None else number(None) for each in sequence.targets[:shown]]
    return Strip(
        rows.name,
        sequence.names[:shown],
        range(shown),
        [values.get(place) for place in range(shown)],
        [(each,) for each in targets],
    )


_LIGHT = 140
"""Brightness, from 0 to 255, from which on the letters are dark."""


@dataclass(frozen=True)
class Strip:
    """One sequence of tokens.

    tokens:    the text of each token
    positions: the position of each token in its sample
    values:    the value of each token; None: no value and no colour
    more:      for each token further texts, for the table
    """

    name: str
    tokens: Sequence[str]
    positions: Sequence[int]
    values: Sequence[float | None]
    more: Sequence[tuple[str, ...]] = ()


def strips(
    title: str,
    sequences: Sequence[Strip],
    *,
    what: str,
    note: str,
    ends: tuple[str, str],
    heads: tuple[str, ...] = (),
) -> Figure:
    """The sequences below each other, on one scale of colours, with all numbers as a table.

    what:  the name of the value, for the table
    ends:  labels for the smallest and the largest value
    heads: the titles of the columns for `more`
    """
    known = [value for each in sequences for value in each.values if value is not None]
    colours, scale = shaded(np.array(known, dtype=np.float64))
    rest = iter(colours)
    body = Markup("").join(
        _strip(each, [None if value is None else next(rest) for value in each.values]) for each in sequences
    )
    rows = [
        (each.name, str(position), token, *more, number(value))
        for each in sequences
        for token, position, value, more in _together(each)
    ]
    table = Table("the numbers", ("sample", "position", "token", *heads, what), tuple(rows))
    return Figure(title, body, note=note, wide=True, scale=worded(scale, *ends), table=table)


def _together(strip: Strip) -> list[tuple[str, int, float | None, tuple[str, ...]]]:
    more = strip.more or [()] * len(strip.tokens)
    return list(zip(strip.tokens, strip.positions, strip.values, more, strict=True))


def _strip(strip: Strip, colours: Sequence[tuple[int, int, int] | None]) -> Markup:
    tokens = Markup("").join(
        _token(token, colour, " · ".join(map(one_line, (f"{position}", *more, number(value)))))
        for (token, position, value, more), colour in zip(_together(strip), colours, strict=True)
    )
    return Markup('<div class="strip"><b>{}</b><p>{}</p></div>').format(one_line(strip.name), tokens)


def _token(text: str, colour: tuple[int, int, int] | None, title: str) -> Markup:
    if colour is None:
        return Markup('<span title="{}">{}</span>').format(title, one_line(text))
    red, green, blue = colour
    shade = "on-light" if 0.299 * red + 0.587 * green + 0.114 * blue > _LIGHT else "on-dark"
    return Markup('<span class="{}" style="background:rgb({} {} {})" title="{}">{}</span>').format(
        shade, red, green, blue, title, one_line(text)
    )
