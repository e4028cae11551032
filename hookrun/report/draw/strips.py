"""Token strips: a text whose tokens are coloured by a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from hookrun.report.draw.charts import Figure, Table
from hookrun.report.draw.pictures import shaded, worded
from hookrun.report.draw.text import number, one_line

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
