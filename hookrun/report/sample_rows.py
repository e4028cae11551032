"""The rows that a capture has of single samples, in the order of their tokens, read in bounded memory."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from hookrun.data.info import SPLITS
from hookrun.report.sampling import LARGEST_ROW, MOST_BYTES, MOST_PARTS, Stream, capture_of, plain, spread
from hookrun.store.captures import StoredCapture
from hookrun.store.shard import row_bytes


@dataclass(frozen=True)
class RowsOfSample:
    """What was captured of one sample at one step: a single row, or a row for each token.

    split:     ``""`` if it is not known
    values:    [rows, ...] float32
    positions, token_ids, keys: [rows]; -1 if a row is not of one token
    """

    split: str
    sample: int
    epoch: int
    step: int
    values: Tensor
    positions: Tensor
    token_ids: Tensor
    keys: Tensor

    @property
    def name(self) -> str:
        """``val 17``."""
        return f"{self.split} sample {self.sample}".strip()

    @property
    def by_token(self) -> bool:
        """Whether each row is of one token."""
        return bool((self.positions >= 0).all())


def rows_of_samples(
    folder: Path, stream: Stream, most: int, known: Container[tuple[str, int]], most_rows: int
) -> list[RowsOfSample]:
    """The rows of the first samples in the last epoch, from the latest step; empty if rows are whole firings.

    most:      number of samples; those in `known` come first
    most_rows: number of rows of each sample

    Raises HookrunError for a shard that can't be read.
    """
    size = row_bytes(stream.dtype, stream.shape)
    if stream.by != "sample" or size > LARGEST_ROW:
        return []
    shown = spread(stream.parts, MOST_PARTS)
    parts = [capture_of(folder, replace(shard, entries=(entry,))) for shard, entry in shown]
    last = max(int(part.epochs.max()) for part in parts)
    pairs = {pair for part in parts for pair in _samples(part, last)}
    named = {pair: (SPLITS[pair[0]] if pair[0] >= 0 else "", pair[1]) for pair in pairs if pair[1] >= 0}
    most = most if size <= MOST_BYTES else 1
    first = sorted(named, key=lambda pair: (named[pair] not in known, pair))[:most]
    most_rows = max(1, min(most_rows, MOST_BYTES // max(size, 1)))
    return [_of_sample(parts, last, pair, named[pair][0], most_rows) for pair in first]


def _samples(part: StoredCapture, epoch: int) -> list[tuple[int, int]]:
    """(split, sample) pairs that have rows in an epoch."""
    there = part.epochs == epoch
    pairs = torch.stack([part.splits[there], part.sample_ids[there]], dim=1).unique(dim=0)
    return [(split, sample) for split, sample in pairs.tolist()]


def _of_sample(
    parts: list[StoredCapture], epoch: int, pair: tuple[int, int], split: str, most: int
) -> RowsOfSample:
    places = [_places(part, epoch, pair) for part in parts]
    step = max(int(part.steps[here].max()) for part, here in zip(parts, places, strict=True) if len(here))
    call = min(
        int(part.calls[here[part.steps[here] == step]].min())
        for part, here in zip(parts, places, strict=True)
        if (part.steps[here] == step).any()
    )
    values, tables = list[Tensor](), list[Tensor]()
    for part, of_epoch in zip(parts, places, strict=True):
        here = of_epoch[part.steps[of_epoch] == step]
        here = here[part.calls[here] == call]
        here = here[: most - sum(map(len, values))]
        if len(here):
            values.append(plain(part[here]))
            columns = (part.positions, part.token_ids, part.keys)
            tables.append(torch.stack([column[here] for column in columns]))
    table, rows = torch.cat(tables, dim=1), torch.cat(values)
    order = table[0].argsort(stable=True)
    return RowsOfSample(split, pair[1], epoch, step, rows[order], *table[:, order])


def _places(part: StoredCapture, epoch: int, pair: tuple[int, int]) -> Tensor:
    is_of = (part.epochs == epoch) & (part.splits == pair[0]) & (part.sample_ids == pair[1])
    return is_of.nonzero().squeeze(1)
