"""Pictures of tokens: captured attention patterns, and strips of tokens, coloured by what was captured or predicted."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hookrun.errors import counted, printable
from hookrun.report.draw.charts import Figure, Table
from hookrun.report.draw.pictures import Array, encoded, is_light, shaded, worded
from hookrun.report.draw.rendering import rendered
from hookrun.report.draw.text import number, token_name
from hookrun.report.facts import RunData, TokenSequence
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


def attention_of(capture: StoredCapture, facts: RunData) -> Iterator[dict[str, Any]]:
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
        if sequence is None:
            continue
        pattern = _pattern(rows, sequence)
        if pattern is not None:
            moment = ""
            if has_epochs:  # the console counts epochs from 1
                moment = f"epoch {int(rows.source.epochs[0]) + 1}, "
            yield pattern.view(rows.name, facts.picked_heads(capture.hook), moment)


def _pattern(rows: DrawnRows, sequence: TokenSequence) -> Pattern | None:
    """The pattern without padding; None if the rows are not a pattern of this sequence."""
    values = rows.values
    count = len(sequence.ids)
    real = slice(sequence.before, sequence.before + count)
    if rows.by_token:  # a row [heads, keys] for each query
        queries = rows.source.positions.tolist()
        if values.dim() != 3 or values.shape[-1] != sequence.width or max(queries) >= count:
            return None
        heads = values.transpose(0, 1)[:, :, real]
    else:
        heads = values[0] if values.dim() == 4 else values
        if len(values) != 1 or heads.shape[-2:] != (sequence.width, sequence.width):
            return None
        heads = heads[:, real, real]
        queries = list(range(count))
    if not is_attention(heads):
        return None
    return Pattern(heads.numpy(), queries, sequence)


def is_attention(heads: Tensor) -> bool:
    """Whether the values [..., queries, keys] of each query sum to 1, or are all 0."""
    sums = heads.sum(-1)
    is_one = (sums - 1).abs() <= _NEAR_ONE
    in_range = (heads >= 0) & (heads <= 1 + _NEAR_ONE)
    return bool(is_one.any() and (is_one | (sums == 0)).all() and in_range.all())


@dataclass(frozen=True)
class Pattern:
    """An attention pattern of one sample.

    heads:   [heads, queries, keys]
    queries: the positions of its queries
    """

    heads: Array
    queries: list[int]
    sequence: TokenSequence

    def view(self, title: str, picked: list[int], moment: str) -> dict[str, Any]:
        """Its pictures, and the mean attention to some kinds of key, over the queries that have such a key.

        picked: the numbers of the heads that were captured; empty if all were
        moment: when it was captured
        """
        keys = self.sequence.names
        count = len(self.heads)
        numbers = picked if len(picked) == count else list(range(count))
        if len(self.queries) == 1:
            figures = [self._heads_of_one_query(numbers)]
            shows = "a row for each head, a column for each key"
        else:
            figures = list(self._pictures(numbers))
            shows = "a row for each query, a column for each key"
            if count > len(figures):
                shows += f"; the first {len(figures)} heads are drawn"
        return {
            "title": title,
            "says": f"{moment}{counted(count, 'head')}, {counted(len(keys), 'token')}: {shows}",
            "figures": figures,
            "table": self._table(numbers),
        }

    def _heads_of_one_query(self, numbers: list[int]) -> Figure:
        """All heads in one picture."""
        query = self.queries[0]
        values = self.heads[:MOST_NUMBERED, 0]
        head = int(np.nan_to_num(values, nan=-1.0).max(1).argmax())
        says = f"most by head {numbers[head]} from {self._strongest(values[head][None])}"
        names = [f"head {number}" for number in numbers[:MOST_NUMBERED]]
        keys = self.sequence.names
        return head_picture(f"from “{keys[query]}” at {query}", values, names, keys, says)

    def _pictures(self, numbers: list[int]) -> Iterator[Figure]:
        """A picture of each of the first heads."""
        keys = self.sequence.names
        queries = [keys[query] for query in self.queries]
        for head, values in zip(numbers[:MOST_HEADS], self.heads, strict=False):
            yield head_picture(f"head {head}", values, queries, keys, f"most from {self._strongest(values)}")

    def _strongest(self, values: Array) -> str:
        return strongest(values, self.queries, self.sequence.names)

    def _table(self, numbers: list[int]) -> Table:
        kinds = self._kinds()
        rows: list[tuple[str, ...]] = []
        for head, values in zip(numbers[:MOST_NUMBERED], self.heads, strict=False):
            means = [_mean_attention(values, pairs) for pairs in kinds.values()]
            rows.append((str(head), *means, self._strongest(values)))
        heads = ("head", *kinds, "strongest")
        return Table("mean attention of each head, over its queries", heads, tuple(rows))

    def _kinds(self) -> dict[str, list[tuple[int, int]]]:
        """Kind of key -> row of the query, position of the key."""
        ids = self.sequence.ids
        first: list[tuple[int, int]] = []
        before: list[tuple[int, int]] = []
        same: list[tuple[int, int]] = []
        copies: list[tuple[int, int]] = []
        for row, query in enumerate(self.queries):
            if query == 0:
                continue
            first.append((row, 0))
            before.append((row, query - 1))
            same.append((row, query))
            for key in range(1, query):
                if ids[key - 1] == ids[query]:
                    copies.append((row, key))
        return {
            "first token": first,
            "token before": before,
            "itself": same,
            # to which an induction head attends (Elhage et al. 2021, A Mathematical Framework for Transformer Circuits)
            "after an earlier copy (induction)": copies,
        }


def _mean_attention(values: Array, pairs: Sequence[tuple[int, int]]) -> str:
    """The mean over the queries of the attention [queries, keys] to the keys of these pairs."""
    if not pairs:
        return "–"
    rows, keys = map(list, zip(*pairs, strict=True))
    return number(round(float(values[rows, keys].sum()) / len(set(rows)), 3))


PLOT = 280
LARGEST_CELL = 26
MOST_CELLS = 64
"""Largest width and height in pixels; for more tokens each pixel is the maximum of a block."""
_LETTER = 6.0
_LINE = 10.5
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
    row_names = _short_names(rows[::block])
    column_names = _short_names(columns[::block])
    cells: Array = pattern
    note = ""
    if block > 1:
        cells = functional.max_pool2d(torch.from_numpy(pattern)[None], block, ceil_mode=True)[0].numpy()
        note = f"each pixel is the largest of {block} × {block} tokens"
    valid = np.ones(cells.shape, dtype=bool)
    if is_causal(pattern):
        valid = np.tril(valid)
    address, scale = encoded(cells, valid, limits=(0.0, 1.0))
    size = min(PLOT / max(cells.shape), LARGEST_CELL)
    picture = rendered(
        "attention.html",
        says=f"{title}: {says}",
        rows=row_names,
        columns=column_names,
        left=_LETTER * max(map(len, row_names), default=1) + 8,
        below=_LETTER * max(map(len, column_names), default=1) + 8,
        width=size * cells.shape[1],
        height=size * cells.shape[0],
        cell=size,
        stride=math.ceil(_LINE / size),
        image=address,
    )
    return Figure(title, picture, note=note, facts=(says,), scale=worded(scale, "none", "all"))


def _short_names(names: Sequence[str]) -> list[str]:
    short: list[str] = []
    for name in names:
        if len(name) > _LONGEST_NAME:
            name = f"{name[: _LONGEST_NAME - 1]}…"
        short.append(name)
    return short


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
    weight = number(round(float(weights[row, key]), 3))
    return f"“{keys[query]}” at {query} to “{keys[key]}” at {key}: {weight}"


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


def strips_of_capture(capture: StoredCapture, facts: RunData) -> list[Figure]:
    """Strips of a capture with `tokens`: its value at each token, or the norm of its values; none for other captures.

    Raises HookrunError for a shard that can't be read.
    """
    samples = Strips()
    for rows in rows_of_samples(capture, MOST_SAMPLES, facts.sequences, MOST_TOKENS):
        if not rows.by_token or not rows.values[0].numel():
            return []
        values = rows.values.flatten()
        if len(values) > len(rows.values):
            values = torch.linalg.vector_norm(rows.values.flatten(1), dim=1)
        tokens = rows.source.token_ids.tolist()
        names = [facts.texts.get(token) or token_name("", token) for token in tokens]
        samples[rows.name] = list(map(Token, names, rows.source.positions.tolist(), values.tolist()))
    if max(map(len, samples.values()), default=0) < 2:
        return []
    what = "norm"
    note = "each token has the colour of the norm of the values there"
    ends = "small", "large"
    if math.prod(capture.shape[1:]) == 1:
        what = "value"
        note = "each token has the colour of the value there"
        ends = "low", "high"
    return [strips(f"{what} at each token", samples, what=what, note=note, ends=ends)]


def strips_of_predictions(capture: StoredCapture, facts: RunData) -> list[Figure]:
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
        tokens = _log_probabilities(rows.values[0], sequence)
        if tokens:
            logs[rows.name] = tokens
    if not logs:
        return []
    return [
        _strips_of_targets(logs, "loss", ("expected", "surprising"), operator.neg),
        _strips_of_targets(logs, "probability", ("unlikely", "likely"), math.exp),
    ]


def _log_probabilities(logits: Tensor, sequence: TokenSequence) -> list[Token]:
    """The tokens with the logarithm of their target's probability; empty without targets of these logits."""
    targets = sequence.targets[:MOST_TOKENS]
    numbers = [target for target in sequence.targets if target is not None]
    if targets.count(None) == len(targets) or max(numbers) >= logits.shape[1]:
        return []
    scores = logits[sequence.before :][:MOST_TOKENS].double().log_softmax(-1)
    tokens: list[Token] = []
    for at, (text, target) in enumerate(zip(sequence.names, targets, strict=False)):
        if target is None:
            tokens.append(Token(text, at, None, (number(None),)))
        else:
            tokens.append(Token(text, at, float(scores[at, target]), (sequence.name(target),)))
    return tokens


def _strips_of_targets(
    logs: Strips, what: str, ends: tuple[str, str], of_value: Callable[[float], float]
) -> Figure:
    note = (
        f"the {what} of the target at each token, for language models the next token; "
        "tokens without a target have no colour"
    )
    title = f"{what} at each token"
    return strips(title, logs, what=what, note=note, ends=ends, heads=("target",), of_value=of_value)


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
    tokens = list(chain.from_iterable(samples.values()))
    values = [of_value(token.value) for token in tokens if token.value is not None]
    colours, scale = shaded(np.array(values, dtype=np.float64))
    shades = iter(colours)
    shown = iter(values)
    rows: list[tuple[str, ...]] = []
    drawn: dict[str, list[dict[str, Any]]] = {}
    for name, of_sample in samples.items():
        drawn[name] = []
        for token in of_sample:
            value = None
            colour = None
            if token.value is not None:
                value = next(shown)
                colour = next(shades)
            texts = [str(token.position), *token.more, number(value)]
            rows.append((name, texts[0], token.text, *texts[1:]))
            says = " · ".join(map(printable, texts))
            drawn[name].append({"text": token.text, "says": says, "colour": colour})
    table = Table("the numbers", ("sample", "position", "token", *heads, what), tuple(rows))
    body = rendered("strips.html", samples=drawn, is_light=is_light)
    return Figure(title, body, note=note, wide=True, scale=worded(scale, *ends), table=table)
