"""Captured attention patterns as pictures of their heads, with the tokens of the sample as axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from markupsafe import Markup
from torch import Tensor

from hookrun.errors import counted
from hookrun.report.draw.charts import Figure, Table
from hookrun.report.draw.pictures import Array, cells_png, worded
from hookrun.report.draw.text import number, one_line
from hookrun.report.facts import Facts, TokenSequence
from hookrun.report.sampling import CapturedRows, rows_of_samples
from hookrun.store.captures.read import StoredCapture

MOST_PICTURES = 480
"""The largest number of heads on a page."""

MOST_SAMPLES = 3
MOST_HEADS = 16
"""The largest number of pictures of one pattern; the table has all."""

MOST_NUMBERED = 256
"""The largest number of heads in the table."""

_NEAR_ONE = 0.02


class HeadPatterns(NamedTuple):
    """The attention of one sample, without padding.

    heads:   [H, queries, keys]
    queries: the positions of the queries among the sample's tokens
    """

    heads: Array
    queries: list[int]


@dataclass(frozen=True)
class HeadPictures:
    """The heads of one sample at one module.

    title, says: the sample, and what rows and columns are
    table:       the mean attention of each head to some kinds of key
    """

    title: str
    says: str
    figures: list[Figure]
    scale: Markup
    table: Table


def attention_of(capture: StoredCapture, facts: Facts) -> list[HeadPictures]:
    """Pictures of the first samples whose tokens are known; empty if the capture does not hold attention patterns.

    A capture counts as a pattern if its numbers of heads, queries and keys fit the sample's tokens, and the numbers of
    each query are between 0 and 1 and sum to 1, or to 0 if a hook has ablated the head.

    Raises HookrunError for a shard that can't be read.
    """
    shape = capture.shape[1:]
    if len(shape) not in (2, 3) or not facts.sequences or not facts.reads_inputs(capture.module):
        return []
    widths = {each.width for each in facts.sequences.values()}
    if shape[-1] not in widths:
        return []
    found = list[HeadPictures]()
    share = max(1, MOST_PICTURES // max(len(facts.captured), 1) // MOST_HEADS)
    longest = max(widths) if len(shape) == 2 else 1
    samples = rows_of_samples(capture, min(MOST_SAMPLES, share), facts.sequences, longest)
    has_epochs = any(rows.epochs.any() for rows in samples)
    for rows in samples:
        sequence = facts.sequences.get(rows.sample)
        pattern = _pattern(rows, sequence) if sequence is not None else None
        if pattern is not None and sequence is not None:
            moment = f"epoch {int(rows.epochs[0]) + 1}, " if has_epochs else ""
            found.append(_drawn(rows, pattern, sequence, facts.picked_heads(capture.hook), moment))
    return found


def _pattern(rows: CapturedRows, sequence: TokenSequence) -> HeadPatterns | None:
    """The pattern in the rows; None if they are not a pattern of the sequence."""
    real = slice(sequence.before, sequence.before + len(sequence.ids))
    values, count = rows.values, len(sequence.ids)
    if not len(values) or (rows.keys >= 0).any():
        return None
    if rows.by_token:  # a row [heads, keys] for each query
        queries = rows.positions.tolist()
        if values.dim() != 3 or values.shape[-1] != sequence.width or max(queries) >= count:
            return None
        heads = values.transpose(0, 1)[:, :, real]
    else:
        heads = values[0] if values.dim() == 4 else values[0][None]
        if len(values) != 1 or heads.shape[-2:] != (sequence.width, sequence.width):
            return None
        heads, queries = heads[:, real, real], list(range(count))
    return HeadPatterns(heads.numpy(), queries) if _is_attention(heads) else None


def _is_attention(heads: Tensor) -> bool:
    """Whether the values [H, queries, keys] of each query sum to 1, or are all 0."""
    sums = heads.sum(-1)
    whole = (sums - 1).abs() <= _NEAR_ONE
    is_shared = bool((whole | (sums == 0)).all()) and bool(whole.any())
    return is_shared and bool(((heads >= 0) & (heads <= 1 + _NEAR_ONE)).all())


def _drawn(
    rows: CapturedRows, pattern: HeadPatterns, sequence: TokenSequence, picked: list[int], moment: str
) -> HeadPictures:
    """moment: when it was captured, as the console counts epochs, from 1."""
    keys = sequence.names
    queries = [Query(keys[place], place) for place in pattern.queries]
    count = len(pattern.heads)
    numbers = picked if len(picked) == count else list(range(count))
    if len(queries) == 1:
        pictures = [_of_one_query(pattern, queries[0], keys, numbers)]
        shows = "a row for each head, a column for each key"
    else:
        pictures = [
            _of_one_head(numbers[place], pattern.heads[place], queries, keys)
            for place in range(min(count, MOST_HEADS))
        ]
        shows = "a row for each query, a column for each key"
        if count > len(pictures):
            shows += f"; the first {len(pictures)} heads are drawn"
    figures = [figure for figure, _ in pictures]
    says = f"{moment}{counted(count, 'head')}, {counted(len(keys), 'token')}: {shows}"
    return HeadPictures(rows.name, says, figures, pictures[0][1], _table(pattern, queries, sequence, numbers))


def _of_one_head(number: int, values: Array, queries: list[Query], keys: list[str]) -> tuple[Figure, Markup]:
    says = f"most from {strongest(values, queries, keys)}"
    names = [query.name for query in queries]
    return head_picture(f"head {number}", values, rows=names, columns=keys, says=says)


def _of_one_query(
    pattern: HeadPatterns, query: Query, keys: list[str], numbers: list[int]
) -> tuple[Figure, Markup]:
    """All heads in one picture."""
    values = pattern.heads[:MOST_NUMBERED, 0]
    names = [f"head {number}" for number in numbers[:MOST_NUMBERED]]
    head = int(np.nan_to_num(values, nan=-1.0).max(1).argmax())
    says = f"most by head {numbers[head]} from {strongest(values[head][None], [query], keys)}"
    return head_picture(
        f"from “{query.name}” at {query.position}", values, rows=names, columns=keys, says=says
    )


def _table(pattern: HeadPatterns, queries: list[Query], sequence: TokenSequence, numbers: list[int]) -> Table:
    heads = (
        "head",
        "first token",
        "token before",
        "itself",
        "after an earlier copy (induction)",
        "strongest",
    )
    keys = sequence.names
    looks = _looks(sequence.ids, pattern.queries)
    rows = list[tuple[str, ...]]()
    for place, values in zip(numbers[:MOST_NUMBERED], pattern.heads, strict=False):
        means = [each.mean(values) for each in looks]
        rows.append((str(place), *means, strongest(values, queries, keys)))
    return Table("mean attention of each head, over its queries", heads, tuple(rows))


class _Look(NamedTuple):
    """One column of the table: the (query row, key) pairs whose attention is averaged."""

    rows: list[int]
    keys: list[int]

    def mean(self, values: Array) -> str:
        """The attention of a query to its keys, summed, and averaged over the queries that have such a key."""
        count = len(set(self.rows))
        return number(round(float(values[self.rows, self.keys].sum()) / count, 3)) if count else "–"


def _looks(ids: tuple[int, ...], queries: list[int]) -> list[_Look]:
    """The pairs for each column of the table."""
    later = [(row, query) for row, query in enumerate(queries) if query]
    rows = [row for row, _ in later]
    copies = [(row, key) for row, query in later for key in _after_copies(ids, query)]
    return [
        _Look(rows, [0] * len(rows)),
        _Look(rows, [query - 1 for _, query in later]),
        _Look(rows, [query for _, query in later]),
        _Look([row for row, _ in copies], [key for _, key in copies]),
    ]


def _after_copies(ids: tuple[int, ...], query: int) -> list[int]:
    """The positions after earlier occurrences of the query's token, to which an induction head attends.

    Elhage et al. 2021, A Mathematical Framework for Transformer Circuits.
    """
    return [key for key in range(1, query) if ids[key - 1] == ids[query]]


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
