"""Pictures of tokens: captured attention patterns, and strips of tokens, coloured by what was captured or predicted."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from markupsafe import Markup
from torch import Tensor
from torch.nn import functional

from hookrun.errors import counted, printable
from hookrun.report.draw.charts import Figure, Table
from hookrun.report.draw.pictures import Array, encoded, is_light, shaded, worded
from hookrun.report.draw.text import number, token_name
from hookrun.report.facts import Facts, TokenSequence
from hookrun.report.sampling import DrawnRows, rows_of_samples
from hookrun.store.captures.read import StoredCapture

MOST_PICTURES = 480
"""The largest number of heads on a page."""

MOST_PATTERNS = 3
MOST_HEADS = 16
"""The largest number of pictures of one pattern; the table has all."""

MOST_NUMBERED = 256
"""The largest number of heads in the table."""

_NEAR_ONE = 0.02


def attention_of(capture: StoredCapture, facts: Facts) -> Iterator[dict[str, Any]]:
    """The heads of the first samples whose tokens are known; nothing if the capture does not hold attention patterns.

    title, says: the sample, and what rows and columns are
    table:       the mean attention of each head to some kinds of key

    A capture counts as a pattern if its numbers of heads, queries and keys fit the sample's tokens, and the numbers of
    each query are between 0 and 1 and sum to 1, or to 0 if a hook has ablated the head.

    Raises HookrunError for a shard that can't be read.
    """
    shape = capture.shape[1:]
    if len(shape) not in (2, 3) or not facts.sequences or not facts.reads_inputs(capture.module):
        return
    widths = {sequence.width for sequence in facts.sequences.values()}
    if shape[-1] not in widths:
        return
    share = max(1, MOST_PICTURES // max(len(facts.captured), 1) // MOST_HEADS)
    longest = max(widths) if len(shape) == 2 else 1
    samples = list(rows_of_samples(capture, min(MOST_PATTERNS, share), facts.sequences, longest))
    has_epochs = any(rows.source.epochs.any() for rows in samples)
    for rows in samples:
        sequence = facts.sequences.get(rows.sample_of(0))
        if sequence is not None and (pattern := _pattern(rows, sequence)) is not None:
            # the console counts epochs from 1
            moment = f"epoch {int(rows.source.epochs[0]) + 1}, " if has_epochs else ""
            yield _drawn(rows.name, *pattern, sequence, facts.picked_heads(capture.hook), moment)


def _pattern(rows: DrawnRows, sequence: TokenSequence) -> tuple[Array, list[int]] | None:
    """The pattern [heads, queries, keys] without padding, and the positions of its queries; None if it is none."""
    real = slice(sequence.before, sequence.before + len(sequence.ids))
    values, count = rows.values, len(sequence.ids)
    if rows.by_token:  # a row [heads, keys] for each query
        queries = rows.source.positions.tolist()
        if values.dim() != 3 or values.shape[-1] != sequence.width or max(queries) >= count:
            return None
        heads = values.transpose(0, 1)[:, :, real]
    else:
        heads = values[0] if values.dim() == 4 else values[0][None]
        if len(values) != 1 or heads.shape[-2:] != (sequence.width, sequence.width):
            return None
        heads, queries = heads[:, real, real], list(range(count))
    return (heads.numpy(), queries) if is_attention(heads) else None


def is_attention(heads: Tensor) -> bool:
    """Whether the values [..., queries, keys] of each query sum to 1, or are all 0."""
    sums = heads.sum(-1)
    whole = (sums - 1).abs() <= _NEAR_ONE
    in_range = (heads >= 0) & (heads <= 1 + _NEAR_ONE)
    return bool(whole.any()) and bool((whole | (sums == 0)).all()) and bool(in_range.all())


def _drawn(
    title: str, heads: Array, queries: list[int], sequence: TokenSequence, picked: list[int], moment: str
) -> dict[str, Any]:
    """The pictures of a pattern [heads, queries, keys], and the mean attention to some kinds of key.

    The mean is over the queries that have such a key.

    picked: the numbers of the heads that were captured; empty if all were
    moment: when it was captured
    """
    keys, count = sequence.names, len(heads)
    numbers = picked if len(picked) == count else list(range(count))
    if len(queries) == 1:  # all heads in one picture
        values, query = heads[:MOST_NUMBERED, 0], queries[0]
        head = int(np.nan_to_num(values, nan=-1.0).max(1).argmax())
        says = f"most by head {numbers[head]} from {strongest(values[head][None], queries, keys)}"
        names = [f"head {number}" for number in numbers[:MOST_NUMBERED]]
        figures = [head_picture(f"from “{keys[query]}” at {query}", values, names, keys, says)]
        shows = "a row for each head, a column for each key"
    else:
        names = [keys[query] for query in queries]
        figures = [
            head_picture(
                f"head {number}", values, names, keys, f"most from {strongest(values, queries, keys)}"
            )
            for number, values in zip(numbers[:MOST_HEADS], heads, strict=False)
        ]
        shows = "a row for each query, a column for each key"
        if count > len(figures):
            shows += f"; the first {len(figures)} heads are drawn"
    ids = sequence.ids
    later = [(row, query) for row, query in enumerate(queries) if query]
    kinds = {
        "first token": [(row, 0) for row, _ in later],
        "token before": [(row, query - 1) for row, query in later],
        "itself": later,
        # to which an induction head attends (Elhage et al. 2021, A Mathematical Framework for Transformer Circuits)
        "after an earlier copy (induction)": [
            (row, key) for row, query in later for key in range(1, query) if ids[key - 1] == ids[query]
        ],
    }

    def mean(values: Array, pairs: list[tuple[int, int]]) -> str:
        rows, keys = [row for row, _ in pairs], [key for _, key in pairs]
        return number(round(float(values[rows, keys].sum()) / len(set(rows)), 3)) if pairs else "–"

    rows = [
        (
            str(name),
            *(mean(values, pairs) for pairs in kinds.values()),
            strongest(values, queries, keys),
        )
        for name, values in zip(numbers[:MOST_NUMBERED], heads, strict=False)
    ]
    return {
        "title": title,
        "says": f"{moment}{counted(count, 'head')}, {counted(len(keys), 'token')}: {shows}",
        "figures": figures,
        "table": Table(
            "mean attention of each head, over its queries", ("head", *kinds, "strongest"), tuple(rows)
        ),
    }


PLOT = 280
LARGEST_CELL = 26
MOST_CELLS = 64
"""Largest width and height in pixels; for more tokens each pixel is the maximum of a block."""
_LETTER, _LINE = 6.0, 10.5
_LONGEST_NAME = 10
"""Characters of a name beside the picture; the table has the whole name."""


def head_picture(
    title: str, pattern: Array, rows: Sequence[str], columns: Sequence[str], says: str
) -> Figure:
    """The picture of one head's pattern [queries, keys], or of all heads of one query [heads, keys].

    rows, columns: the names of rows and columns
    says: text alternative of the picture
    """
    block = math.ceil(max(pattern.shape) / MOST_CELLS)
    rows, columns = (
        [name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…" for name in names[::block]]
        for names in (rows, columns)
    )
    cells: Array = pattern
    if block > 1:
        cells = functional.max_pool2d(torch.from_numpy(pattern)[None], block, ceil_mode=True)[0].numpy()
    there = np.ones(cells.shape, dtype=bool)
    if is_causal(pattern):
        there = np.tril(there)
    address, scale = encoded(cells, there, limits=(0.0, 1.0))
    size = min(PLOT / max(cells.shape), LARGEST_CELL)
    high, wide = size * cells.shape[0], size * cells.shape[1]
    left, below = (_LETTER * max(map(len, names), default=1) + 8 for names in (rows, columns))
    every = math.ceil(_LINE / size)
    names = [
        Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="end">{}</text>').format(
            left - 4, 2 + size * (place + 0.5) + 3.4, printable(rows[place])
        )
        for place in range(0, len(rows), every)
    ] + [
        Markup('<text transform="translate({:.1f} {:.1f}) rotate(-90)" text-anchor="end">{}</text>').format(
            left + size * (place + 0.5) + 3.4, high + 6, printable(columns[place])
        )
        for place in range(0, len(columns), every)
    ]
    svg = Markup(
        '<svg class="chart attention" role="img" viewBox="0 0 {w} {h}" style="max-width:{w}px" aria-label="{says}">'
        '<rect class="ground" x="{x:.1f}" y="2" width="{pw:.1f}" height="{ph:.1f}"/>'
        '<image x="{x:.1f}" y="2" width="{pw:.1f}" height="{ph:.1f}" preserveAspectRatio="none" href="{image}"/>'
        "{names}</svg>"
    ).format(
        w=math.ceil(left + wide + 8),
        h=math.ceil(high + below + 6),
        says=printable(f"{title}: {says}"),
        x=left,
        pw=wide,
        ph=high,
        image=address,
        names=Markup("").join(names),
    )
    note = f"each pixel is the largest of {block} × {block} tokens" if block > 1 else ""
    return Figure(title, svg, note=note, facts=(says,), scale=worded(scale, "none", "all"))


def is_causal(pattern: Array) -> bool:
    """Whether there are later keys and no query of [queries, keys] attends to one."""
    rows, columns = pattern.shape
    return rows == columns > 1 and not np.triu(pattern, 1).any()


def strongest(pattern: Array, queries: Sequence[int], keys: Sequence[str]) -> str:
    """Text that says where the head attends most, not counting the first query, which may have one key only.

    queries: the position of each row's token
    """
    free = [row for row, query in enumerate(queries) if query] or list(range(len(queries)))
    weights = np.nan_to_num(pattern[free], nan=-1.0)
    row, key = divmod(int(weights.argmax()), weights.shape[1])
    query = queries[free[row]]
    return (
        f"“{keys[query]}” at {query} to “{keys[key]}” at {key}: {number(round(float(weights[row, key]), 3))}"
    )


MOST_SAMPLES = 4
MOST_TOKENS = 192
"""The largest number of tokens of one sample."""


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
        names = [facts.texts.get(token) or token_name("", token) for token in rows.source.token_ids.tolist()]
        samples[rows.name] = list(map(Token, names, rows.source.positions.tolist(), values.tolist()))
    if max(map(len, samples.values()), default=0) < 2:
        return []
    is_value = torch.Size(capture.shape[1:]).numel() == 1
    what, of = ("value", "the value") if is_value else ("norm", "the norm of the values")
    return [
        strips(
            f"{what} at each token",
            samples,
            what=what,
            note=f"each token has the colour of {of} there",
            ends=("low", "high") if is_value else ("small", "large"),
        )
    ]


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
    note = (
        "the {} of the target at each token, for language models the next token; "
        "tokens without a target have no colour"
    )
    return [
        strips(
            f"{what} at each token",
            logs,
            what=what,
            note=note.format(what),
            ends=ends,
            heads=("target",),
            of_value=of_log,
        )
        for what, ends, of_log in (
            ("loss", ("expected", "surprising"), operator.neg),
            ("probability", ("unlikely", "likely"), math.exp),
        )
        if logs
    ]


def strips(
    title: str,
    samples: Strips,
    *,
    what: str,
    note: str,
    ends: tuple[str, str],
    heads: tuple[str, ...] = (),
    of_value: Callable[[float], float] = float,
) -> Figure:
    """The samples below each other, on one scale of colours, with all numbers as a table.

    what:     the name of the value, for the table
    ends:     labels for the smallest and the largest value
    heads:    the titles of the columns for `more`
    of_value: what is shown of a token's value
    """
    values = [
        of_value(token.value) for tokens in samples.values() for token in tokens if token.value is not None
    ]
    colours, scale = shaded(np.array(values, dtype=np.float64))
    rest = zip(values, colours, strict=True)
    body, rows = Markup(), list[tuple[str, ...]]()
    for name, tokens in samples.items():
        strip = Markup()
        for token in tokens:
            value, colour = (None, None) if token.value is None else next(rest)
            rows.append((name, str(token.position), token.text, *token.more, number(value)))
            style = (
                Markup("")
                if colour is None
                else Markup('class="on-{}" style="background:rgb({} {} {})" ').format(
                    "light" if is_light(*colour) else "dark", *colour
                )
            )
            shown = " · ".join(map(printable, (f"{token.position}", *token.more, number(value))))
            strip += Markup('<span {}title="{}">{}</span>').format(style, shown, printable(token.text))
        body += Markup('<div class="strip"><b>{}</b><p>{}</p></div>').format(printable(name), strip)
    table = Table("the numbers", ("sample", "position", "token", *heads, what), tuple(rows))
    return Figure(title, body, note=note, wide=True, scale=worded(scale, *ends), table=table)
