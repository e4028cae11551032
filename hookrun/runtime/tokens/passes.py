"""One call of the model, as one pass over the tokens of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, Protocol

import torch
from torch import Tensor

from hookrun.runtime.tokens.calls import Session, Told


class Pass:
    """One call of the model: the last `columns` of the `total` columns of the sequences so far.

    rows:      sequences in the batch, B: its samples, or several of each with beams
    ids:       [B, total] int64 on the CPU, or None: not known
    real:      [B, total] bool on the CPU: tokens, and not padding
    prompt:    columns of the prompt
    new_from:  the first column that no earlier pass has computed
    goes_on:   more passes may follow: a position that is not there yet may still come
    session:   the `generate` that it is a part of, or None
    number:    of the batch's first sample, counted from 0 in the order of the calls
    has_data:  False in a shape check: `real` and `positions` are made up
    ended:     [B] bool: sequences whose end-of-text token came, None: none
    decodes:   of a decoder that has an encoder, whose tokens the spans of the samples are about
    encoder:   of a decoder's pass, that of its encoder
    packed:    rows hold several sequences, among which positions cannot be counted
    chosen:    what clauses chose of it so far; see `choice`
    """

    __slots__ = (
        "_positions",
        "chosen",
        "columns",
        "decodes",
        "encoder",
        "ended",
        "goes_on",
        "has_data",
        "ids",
        "new_from",
        "number",
        "packed",
        "prompt",
        "real",
        "rows",
        "session",
        "spans",
        "told",
        "total",
    )

    def __init__(
        self,
        told: Told,
        *,
        real: Tensor,
        ids: Tensor | None,
        prompt: int,
        new_from: int,
        number: int,
        session: Session | None,
        spans: Mapping[str, Tensor],
        by_hand: bool,
        ended: Tensor | None = None,
        decodes: bool = False,
    ) -> None:
        self.rows, self.columns, self.total = told.rows, told.columns, real.shape[1]
        self.ids, self.real, self.prompt = ids, real, prompt
        self.new_from, self.number = new_from, number
        self.session, self.spans, self.told = session, spans, by_hand
        self.goes_on = session is not None
        self.has_data, self.packed = told.real, told.packed
        self.ended, self.decodes = ended, decodes
        if session is not None and session.eos and ids is not None and self.total > prompt:
            self._end(session.eos)
        self._positions: Tensor | None = None
        self.encoder: Pass | None = None
        self.chosen = dict[Any, Any]()

    def _end(self, eos: tuple[int, ...]) -> None:
        """What comes from a sequence's end-of-text token on is padding; an earlier pass knows of the ends before it."""
        start = max(self.prompt, self.new_from)
        assert self.ids is not None
        new = self.ids[:, start:]
        hits = new == eos[0]
        for token in eos[1:]:
            hits |= new == token
        if self.ended is None and not hits.any():
            return
        ended = hits.cumsum(1) > 0
        if self.ended is not None:
            ended |= self.ended[:, None]
        self.real = torch.cat([self.real[:, :start], self.real[:, start:] & ~ended], dim=1)
        self.ended = ended[:, -1]

    @property
    def positions(self) -> Tensor:
        """[B, total] int64: counted from the first real token; of padding that of the token before it."""
        if self._positions is None:
            self._positions = self.real.cumsum(1) - 1
        return self._positions

    @property
    def first(self) -> bool:
        """Whether it computes the prompt for the first time."""
        return self.new_from < self.prompt

    def seen_by(self, decoder: Pass) -> Pass:
        """An encoder's pass as the modules of a decoder meet it: in each of its passes, a row for each of its rows."""
        seen = copy(self)
        each = decoder.rows // self.rows if decoder.rows % self.rows == 0 else 1
        seen.rows = self.rows * each
        seen.real, seen._positions = self.real.repeat_interleave(each, 0), None
        seen.ids = None if self.ids is None else self.ids.repeat_interleave(each, 0)
        seen.new_from = self.total if decoder.new_from else self.new_from
        seen.chosen = {}
        return seen

    def samples_of_rows(self, count: int | None) -> Tensor:
        """[B] int64: the place in the batch of the sample that each row is of, out of `count`; None: not known."""
        return torch.arange(self.rows) // self.rows_for_each(count)

    def rows_for_each(self, count: int | None) -> int:
        """How many rows each of `count` samples has; ValueError where the rows cannot be those of so many."""
        if count is None and self.session is not None:
            count = self.session.samples
        if count is None or count == self.rows:
            return 1
        if count < 1 or self.rows % count or not self.goes_on:
            raise ValueError(f"the call has {self.rows} sequences and the batch {count} samples")
        return self.rows // count  # beams, or several sequences for each prompt


class Passes(Protocol):
    """What follows the calls of a model."""

    @property
    def current(self) -> Pass | None:
        """The pass under way in this thread; None: nothing says which tokens it computes."""
