"""Token strips: the tokens of the first samples, coloured by what was captured or predicted at each."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from markupsafe import Markup

from hookrun.errors import printable
from hookrun.report.draw.charts import Figure, Table
from hookrun.report.draw.pictures import shaded, worded
from hookrun.report.draw.text import number, token_name
from hookrun.report.facts import Facts
from hookrun.report.sampling import rows_of_samples
from hookrun.store.captures.read import StoredCapture

MOST_SAMPLES = 4
MOST_TOKENS = 192
"""The largest number of tokens of one sample."""

_LIGHT = 140
"""Brightness, from 0 to 255, from which on the letters are dark."""


@dataclass(frozen=True)
class Token:
    """A token of a strip.

    position: in its sample
    value:    None: no value and no colour
    more:     further texts, for the table
    """

    text: str
    position: int
    value: float | None
    more: tuple[str, ...] = ()


Strips = dict[str, list[Token]]
"""The name of each sample -> its tokens."""


def strips_of_capture(capture: StoredCapture, facts: Facts) -> list[Figure]:
    """Strips of a capture with `tokens`: its value at each token, or the norm of its values; none for other captures.

    Raises HookrunError for a shard that can't be read.
    """
    samples = Strips()
    for rows in rows_of_samples(capture, MOST_SAMPLES, facts.sequences, MOST_TOKENS):
        if not rows.by_token or not rows.values[0].numel():
            return []
        flat = rows.values.reshape(len(rows.values), -1)
        values = flat[:, 0] if flat.shape[1] == 1 else torch.linalg.vector_norm(flat, dim=1)
        names = [facts.texts.get(token) or token_name("", token) for token in rows.token_ids.tolist()]
        samples[rows.name] = list(map(Token, names, rows.positions.tolist(), values.tolist()))
    if max(map(len, samples.values()), default=0) < 2:
        return []
    if torch.Size(capture.shape[1:]).numel() == 1:
        what, of, ends = "value", "the value", ("low", "high")
    else:
        what, of, ends = "norm", "the norm of the values", ("small", "large")
    note = f"each token has the colour of {of} there"
    return [strips(f"{what} at each token", samples, what=what, note=note, ends=ends)]


def strips_of_predictions(capture: StoredCapture, facts: Facts) -> list[Figure]:
    """Strips of logits [tokens, vocabulary]: loss and probability of the target at each token; none for others.

    Raises HookrunError for a shard that can't be read.
    """
    shape = capture.shape[1:]
    if len(shape) != 2 or facts.has_encoder or not facts.sequences:
        return []
    logs = Strips()
    for rows in rows_of_samples(capture, MOST_SAMPLES, facts.sequences, 1):
        sequence = facts.sequences.get(rows.sample_of(0))
        if sequence is None or shape[0] != sequence.width:
            continue
        targets = {at: target for at, target in enumerate(sequence.targets) if target is not None}
        if min(targets, default=MOST_TOKENS) >= MOST_TOKENS or max(targets.values()) >= shape[1]:
            continue
        scores = rows.values[0][sequence.before :][:MOST_TOKENS].double().log_softmax(-1)
        logs[rows.name] = [
            Token(text, at, float(scores[at, targets[at]]), (sequence.name(targets[at]),))
            if at in targets
            else Token(text, at, None, (number(None),))
            for at, text in enumerate(sequence.names[:MOST_TOKENS])
        ]
    if not logs:
        return []
    note = "of the target at each token, for language models the next token; tokens without a target have no colour"
    figures = list[Figure]()
    for what, ends, of_log in (
        ("loss", ("expected", "surprising"), operator.neg),
        ("probability", ("unlikely", "likely"), math.exp),
    ):
        samples = {
            name: [
                token if token.value is None else replace(token, value=of_log(token.value))
                for token in tokens
            ]
            for name, tokens in logs.items()
        }
        title, note_of = f"{what} at each token", f"the {what} {note}"
        figures.append(strips(title, samples, what=what, note=note_of, ends=ends, heads=("target",)))
    return figures


def strips(
    title: str, samples: Strips, *, what: str, note: str, ends: tuple[str, str], heads: tuple[str, ...] = ()
) -> Figure:
    """The samples below each other, on one scale of colours, with all numbers as a table.

    what:  the name of the value, for the table
    ends:  labels for the smallest and the largest value
    heads: the titles of the columns for `more`
    """
    tokens = [token for sample in samples.values() for token in sample]
    values = [token.value for token in tokens if token.value is not None]
    colours, scale = shaded(np.array(values, dtype=np.float64))
    rest = iter(colours)
    strip = Markup('<div class="strip"><b>{}</b><p>{}</p></div>')
    body = Markup("").join(
        strip.format(
            printable(name),
            Markup("").join(_token(token, None if token.value is None else next(rest)) for token in sample),
        )
        for name, sample in samples.items()
    )
    rows = tuple(
        (name, str(token.position), token.text, *token.more, number(token.value))
        for name, sample in samples.items()
        for token in sample
    )
    table = Table("the numbers", ("sample", "position", "token", *heads, what), rows)
    return Figure(title, body, note=note, wide=True, scale=worded(scale, *ends), table=table)


def _token(token: Token, colour: Sequence[int] | None) -> Markup:
    title = " · ".join(map(printable, (f"{token.position}", *token.more, number(token.value))))
    if colour is None:
        return Markup('<span title="{}">{}</span>').format(title, printable(token.text))
    red, green, blue = colour
    shade = "on-light" if 0.299 * red + 0.587 * green + 0.114 * blue > _LIGHT else "on-dark"
    return Markup('<span class="{}" style="background:rgb({} {} {})" title="{}">{}</span>').format(
        shade, red, green, blue, title, printable(token.text)
    )
