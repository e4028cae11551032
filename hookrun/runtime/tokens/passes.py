"""`Pass`: the tokens of one call of the model."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from hookrun.runtime.tokens.calls import CallTokens, Session


class Pass:
    """One call of the model. It computes the last `columns` of the `total` columns that the sequences have so far.

    rows:      the number of sequences in the batch, B: one for each sample, or several with beams
    ids:       [B, total] int64 on the CPU: token ids; None: not known
    real:      [B, total] bool on the CPU: False for padding
    prompt:    the number of columns of the prompt
    new_from:  the first column that no earlier pass has computed
    goes_on:   more passes may follow, so that later positions may still come
    session:   the `generate` call that it is part of, or None
    number:    the number of the batch's first sample, counted from 0 in the order of the calls
    has_data:  False in a trial run: `real` and `positions` are placeholders
    ended:     [B] bool: sequences that have an end-of-text token; None: no sequence has one
    by_hand:   the tokens were given by `hooks.tokens`
    decodes:   it is a pass of a decoder with an encoder; spans then refer to the encoder's tokens
    encoder:   for a decoder's pass, the pass of its encoder
    packed:    rows hold several sequences, so that positions cannot be counted
    chosen:    cache of the positions that were selected in it; see `choice`
    """

    def __init__(
        self,
        tokens: CallTokens,
        *,
        real: Tensor,
        prompt: int,
        ids: Tensor | None = None,
        new_from: int = 0,
        number: int = 0,
        session: Session | None = None,
        spans: Mapping[str, Tensor] = MappingProxyType({}),
        by_hand: bool = False,
        ended: Tensor | None = None,
        decodes: bool = False,
    ) -> None:
        self.rows, self.columns, self.total = tokens.rows, tokens.columns, real.shape[1]
        self.ids, self.real, self.prompt = ids, real, prompt
        self.new_from, self.number = new_from, number
        self.session, self.spans, self.by_hand = session, spans, by_hand
        self.goes_on = session is not None
        self.has_data, self.packed = tokens.has_data, tokens.packed
        self.ended, self.decodes = ended, decodes
        if session is not None and session.eos and ids is not None and self.total > prompt:
            self._mark_ended(session.eos)
        self._positions: Tensor | None = None
        self.encoder: Pass | None = None
        self.chosen = dict[Any, Any]()

    def _mark_ended(self, eos: tuple[int, ...]) -> None:
        """Make generated tokens padding from the end-of-text token on; `ended` has the ends in earlier passes."""
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
        """[B, total] int64: positions, counted from the first real token; padding has that of the token before it."""
        if self._positions is None:
            self._positions = self.real.cumsum(1) - 1
        return self._positions

    @property
    def first(self) -> bool:
        """Whether the pass computes the prompt, or a part of it, for the first time."""
        return self.new_from < self.prompt

    def seen_by(self, decoder: Pass) -> Pass:
        """This encoder pass for cross-attention modules of a decoder pass: a row for each row of the decoder."""
        seen = copy(self)
        times = decoder.rows // self.rows if decoder.rows % self.rows == 0 else 1
        seen.rows = self.rows * times
        seen.real, seen._positions = self.real.repeat_interleave(times, 0), None
        seen.ids = None if self.ids is None else self.ids.repeat_interleave(times, 0)
        seen.new_from = self.total if decoder.new_from else self.new_from
        seen.chosen = {}
        return seen

    def samples_of_rows(self, count: int | None) -> Tensor:
        """[B] int64: for each row the place of its sample in the batch of `count` samples (None: not known)."""
        return torch.arange(self.rows) // self.rows_for_each(count)

    def rows_for_each(self, count: int | None) -> int:
        """How many rows each of `count` samples has. Raises ValueError if the rows cannot be divided among them."""
        if count is None and self.session is not None:
            count = self.session.samples
        if count is None or count == self.rows:
            return 1
        if count < 1 or self.rows % count or not self.goes_on:
            raise ValueError(f"the call has {self.rows} sequences and the batch {count} samples")
        return self.rows // count  # beams, or several sequences for each prompt
