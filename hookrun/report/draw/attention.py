"""Attention patterns as pictures: a row for each query, a column for each key, with the tokens as names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from hookrun.report.draw.charts import Figure
from hookrun.report.draw.pictures import Array, cells_png, worded
from hookrun.report.draw.text import number, one_line

PLOT = 280
LARGEST_CELL = 26
MOST_CELLS = 64
"""Largest width and height in pixels; for more tokens each pixel is the maximum of a block."""
_LETTER, _LINE = 6.0, 10.5
_LONGEST_NAME = 10
"""Characters of a name beside the picture; the table has the whole name."""


def head_picture(
    title: str, pattern: Array, *, rows: Sequence[str], columns: Sequence[str], says: str
) -> tuple[Figure, Markup]:
    """The picture of one head's pattern [queries, keys], or of all heads of one query [heads, keys], and its colours.

    rows, columns: the names of rows and columns
    says: text alternative of the picture
    """
    block = math.ceil(max(pattern.shape) / MOST_CELLS)
    rows, columns = rows[::block], columns[::block]
    cells = _largest_of_blocks(pattern, block)
    there = np.ones(cells.shape, dtype=bool)
    if is_causal(pattern):
        there = np.tril(there)
    address, scale = cells_png(cells, (0.0, 1.0), there)
    size = min(PLOT / max(cells.shape), LARGEST_CELL)
    high, wide = size * cells.shape[0], size * cells.shape[1]
    left, below = (_LETTER * max(map(len, map(_short, names)), default=1) + 8 for names in (rows, columns))
    whole_width, whole_height = math.ceil(left + wide + 8), math.ceil(high + below + 6)
    names = Markup("").join([*_beside(rows, size, left), *_below(columns, size, left, high)])
    svg = Markup(
        '<svg class="chart attention" role="img" viewBox="0 0 {w} {h}" style="max-width:{w}px" aria-label="{says}">'
        '<rect class="ground" x="{x:.1f}" y="2" width="{pw:.1f}" height="{ph:.1f}"/>'
        '<image x="{x:.1f}" y="2" width="{pw:.1f}" height="{ph:.1f}" preserveAspectRatio="none" href="{image}"/>'
        "{names}</svg>"
    ).format(
        w=whole_width,
        h=whole_height,
        says=one_line(f"{title}: {says}"),
        x=left,
        pw=wide,
        ph=high,
        image=address,
        names=names,
    )
    note = f"each pixel is the largest of {block} × {block} tokens" if block > 1 else ""
    return Figure(title, svg, note=note, facts=(says,)), worded(scale, "none", "all")


def is_causal(pattern: Array) -> bool:
    """Whether there are later keys and no query of [queries, keys] attends to one."""
    rows, columns = pattern.shape
    return rows == columns > 1 and not np.triu(pattern, 1).any()


class Query(NamedTuple):
    """A row of a pattern: the query's token and its position in the sample."""

    name: str
    position: int


def strongest(pattern: Array, queries: Sequence[Query], keys: Sequence[str]) -> str:
    """Text that says where the head attends most, not counting the first query, which may have one key only."""
    free = [row for row, query in enumerate(queries) if query.position] or list(range(len(queries)))
    seen = np.nan_to_num(pattern[free], nan=-1.0)
    row, key = (int(each) for each in np.unravel_index(int(seen.argmax()), seen.shape))
    query = queries[free[row]]
    value = number(round(float(seen[row, key]), 3))
    return f"“{query.name}” at {query.position} to “{keys[key]}” at {key}: {value}"


def _largest_of_blocks(pattern: Array, block: int) -> Array:
    if block == 1:
        return pattern
    rows, columns = (math.ceil(length / block) for length in pattern.shape)
    padded = np.full((rows * block, columns * block), -np.inf, dtype=pattern.dtype)
    padded[: pattern.shape[0], : pattern.shape[1]] = pattern
    found: Array = padded.reshape(rows, block, columns, block).max(axis=(1, 3))
    return found


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def _beside(names: Sequence[str], size: float, left: float) -> list[Markup]:
    every = math.ceil(_LINE / size)
    text = Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="end">{}</text>')
    return [
        text.format(left - 4, 2 + size * (place + 0.5) + 3.4, one_line(_short(names[place])))
        for place in range(0, len(names), every)
    ]


def _below(names: Sequence[str], size: float, left: float, high: float) -> list[Markup]:
    every = math.ceil(_LINE / size)
    text = Markup('<text transform="translate({:.1f} {:.1f}) rotate(-90)" text-anchor="end">{}</text>')
    return [
        text.format(left + size * (place + 0.5) + 3.4, high + 6, one_line(_short(names[place])))
        for place in range(0, len(names), every)
    ]
