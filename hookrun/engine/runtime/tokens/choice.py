"""Finds the positions that a `tokens` clause selects in a pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hookrun.engine.actions.base import TokenRows
from hookrun.engine.runtime.tokens.calls import Pass
from hookrun.engine.spec.tokens import Place, TokenFilter, Tokens, TokenSet
from hookrun.engine.values.tensors import on_device
from hookrun.errors import nearest

TWICE = -2
"""The position of a span whose text a sample has more than once; -1: it does not have the span."""

Texts = Mapping[str, tuple[tuple[int, ...], ...]]
"""Text -> the ways in which it may be tokens: at the start of a text and within one."""


class Chosen:
    """N selected positions of a tensor, ordered by sample and then by position.

    of:        the pass
    sequences: [N]: their indices along the first dimension
    columns:   [N] for each position dimension: their indices along it
    """

    def __init__(
        self, of: Pass, sequences: Tensor, columns: Sequence[Tensor], rows: Callable[[], TokenRows]
    ) -> None:
        self.of = of
        self._find_rows = rows
        self._indices = (sequences, *columns)
        self._on = dict[torch.device, tuple[Tensor, ...]]()

    def __len__(self) -> int:
        return len(self._indices[0])

    @cached_property
    def rows(self) -> TokenRows:
        """The sample and the token of each position; computed on first use, since edits do not need it."""
        with unset_fake_temporarily():
            return self._find_rows()

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """The indices along the first dimension and the position dimensions, on a device."""
        if device.type == "cpu":
            return self._indices
        if (indices := self._on.get(device)) is None:
            indices = self._on[device] = tuple(on_device(index, device) for index in self._indices)
        return indices


class Rule(NamedTuple):
    """The selection of a hook.

    tokens: the clause
    once:   select a position only in the first pass that computes it
    texts:  the token ids of the texts in the clause
    """

    tokens: Tokens
    once: bool
    texts: Texts

    def choose(self, of: Pass, sizes: tuple[int, ...], samples: Tensor | None) -> Chosen:
        """The selected positions in a tensor with these sizes along its position dimensions.

        samples: the sample numbers of the batch, [n] int64; None: not known

        Raises ValueError if a size does not fit the pass, or if a sample does not have a selected position.
        """
        # `Chosen` holds the rule: as long as the key is there, no other object gets the ids of these two
        key = (id(self.tokens), id(self.texts), self.once, sizes)
        if (chosen := of.chosen.get(key)) is None:
            with unset_fake_temporarily():  # trial runs index fake tensors with real index tensors
                chosen = of.chosen[key] = _choose(self, of, sizes, samples)
        return chosen


def _choose(rule: Rule, of: Pass, sizes: tuple[int, ...], samples: Tensor | None) -> Chosen:
    tokens = rule.tokens
    clauses: list[TokenFilter | None] = [tokens]
    if tokens.on_pattern:
        clauses = [tokens.query, tokens.key]
    all_starts = [_start(of, size) for size in sizes]
    starts: list[int] = []  # of each dimension with a clause
    hits: list[Tensor] = []
    for clause, size, start in zip(clauses, sizes, all_starts, strict=True):
        if clause is None:
            continue
        hit = _columns(rule, clause, of, start, size)
        earlier = of.new_from - start  # columns that an earlier pass has computed
        if rule.once and earlier > 0 and clause is not tokens.key:
            hit[:, :earlier] = False
        starts.append(start)
        hits.append(hit)
    selected = hits[0]
    if len(hits) > 1:
        selected = selected[:, :, None] & hits[1][:, None, :]
    sequences, *columns = selected.nonzero(as_tuple=True)
    count = None if samples is None else len(samples)
    of.rows_for_each(count)  # raises, for edits too, if the batch does not have the samples of the call

    def rows() -> TokenRows:
        in_batch = of.samples_of_rows(count)[sequences]
        numbers = in_batch + of.number if samples is None else samples[in_batch]
        places = [column + start for column, start in zip(columns, starts, strict=True)]
        positions = places
        if not rule.tokens.padding:
            positions = [of.positions[sequences, place] for place in places]
        ids = torch.full_like(sequences, -1)
        if of.ids is not None:
            ids = of.ids[sequences, places[0]]
        return TokenRows(in_batch, numbers, positions[0], ids, *positions[1:])

    return Chosen(of, sequences, columns, rows)


def _start(of: Pass, size: int) -> int:
    """The first column of a dimension of this size: it holds either the columns of the pass or all columns so far."""
    if size == of.columns:
        return of.total - of.columns
    if size == of.total:
        return 0
    so_far = f", {of.total} with those before it" if of.total != of.columns else ""
    raise ValueError(
        f"the dimension has size {size} and the call {of.columns} tokens{so_far}; name the sequence dimension with "
        "tokens: {…, dim: 2}, or the tensor with `target`"
    )


# ---- a clause over all columns ---------------------------------------------------------------------------------


def _columns(rule: Rule, clause: TokenFilter, of: Pass, start: int, size: int) -> Tensor:
    """[B, size] bool: which columns from `start` on are selected, regardless of earlier passes."""
    if of.decodes and any(True for _ in clause.spans):
        raise ValueError(
            "tokens: spans refer to the encoder's tokens, and this is a module of the decoder: select its tokens by "
            "position, id or text, or hook the encoder or the keys and values of the cross-attention"
        )
    end = start + size
    if not of.has_data:
        return _placeholder_columns(clause, of)[:, start:end]
    return _Columns(rule, of, clause.phase).of_filter(clause)[:, start:end]


class _Columns:
    """Selects columns of one pass.

    _counted: [B, total]: positions counted from the first real token, or under `generation` from the first generated
    _lengths: [B, 1]: the number of tokens of each prompt
    """

    def __init__(self, rule: Rule, of: Pass, phase: str | None) -> None:
        self._texts = rule.texts
        self._of = of
        self._phase = phase
        self._skips = rule.tokens.missing == "skip"
        self._real = of.real
        positions = of.positions
        if rule.tokens.padding:
            self._real = torch.ones_like(of.real)
            positions = self._real.cumsum(1) - 1
        self._in_prompt = torch.arange(of.total) < of.prompt
        self._lengths = (self._real & self._in_prompt).sum(1, keepdim=True)
        self._counted = positions
        if phase == "generation":
            self._counted = positions - self._lengths

    def of_filter(self, clause: TokenFilter) -> Tensor:
        """[B, total] bool: the columns of the phase that the clause selects, without the excluded ones."""
        columns = self._real & self._of_set(clause, strict=not self._skips)
        if self._phase == "prompt":
            columns = columns & self._in_prompt
        elif self._phase == "generation":
            columns = columns & ~self._in_prompt
        if clause.exclude is not None:
            columns = columns & ~self._of_set(clause.exclude, strict=False)
        return columns

    def _of_set(self, clause: TokenSet, *, strict: bool) -> Tensor:
        columns = torch.ones_like(self._real)
        has_numbers = clause.position is not None and any(
            True for _ in clause.position.numbers
        )  # `all` has none
        if self._of.packed and (clause.span is not None or has_numbers):
            raise ValueError(
                "tokens: the position_ids of the call start again within a row, so the row holds several sequences: "
                "positions and spans need one; give each its own row, or select tokens by id or text"
            )
        if clause.position is not None:
            columns = columns & self._of_places(clause.position.places, strict)
        if clause.id is not None:
            columns = columns & torch.isin(self._ids(), torch.tensor(clause.id))
        if clause.text is not None:
            columns = columns & self._of_texts(clause.text)
        if clause.span is not None:
            columns = columns & self._of_span(clause.span, strict)
        return columns

    def _of_places(self, places: Sequence[Place], strict: bool) -> Tensor:
        columns = torch.zeros_like(self._real)
        for place in places:
            hit = self._of_place(place)
            if strict and self._of.first and self._phase != "generation":
                self._require(place, hit)
            columns |= hit
        return columns

    def _of_place(self, place: Place) -> Tensor:
        if isinstance(place, int):
            hit = self._counted == self._from_start(place)
            if place < 0:
                hit &= self._in_prompt
            return hit
        start = place.start
        end = place.end
        low = 0 if start is None else self._from_start(start).clamp_min(0)
        hit = self._counted >= low
        if end is not None:
            hit &= self._counted < self._from_start(end)
        if place.every > 1:
            hit &= (self._counted - low) % place.every == 0
        if start is not None and start < 0:
            hit &= self._in_prompt
        return hit

    def _from_start(self, number: int) -> Tensor:
        """A position counted from the start: [B, 1] for a negative one, which counts from the end of the prompt."""
        return self._lengths + number if number < 0 else torch.tensor(number)

    def _require(self, place: Place, hit: Tensor) -> None:
        """Raise ValueError if a sample does not have a named position and a later pass cannot compute it either."""
        numbers: list[int | None] = []
        if isinstance(place, int):
            numbers.append(place)
        else:
            numbers.append(place.start)
            numbers.append(None if place.end is None else place.end - 1)
        later_too = self._of.goes_on and self._phase is None
        for number in numbers:
            if number is not None and (number < 0 or not later_too):
                self._require_all(f"position {number}", self._of_place(number) & self._in_prompt)
        if not self._of.goes_on or self._phase == "prompt":
            self._require_all(f"position in {place}", hit)

    def _require_all(self, what: str, columns: Tensor) -> None:
        lacks = ~(columns & self._real).any(1)
        if lacks.any():
            self._raise_missing(lacks, what)

    def _raise_missing(self, lacks: Tensor, what: str) -> None:
        row = int(lacks.nonzero()[0])
        raise ValueError(
            f"tokens: sequence {row} of the batch has {int(self._lengths[row])} tokens and no {what}; tokens: "
            "{…, missing: skip} leaves out what a sample does not have"
        )

    def _ids(self) -> Tensor:
        if self._of.ids is None:
            raise ValueError(
                "tokens: the ids of the call's tokens are not known: call hooks.tokens(input_ids) before it"
            )
        return self._of.ids

    def _of_texts(self, texts: Sequence[str]) -> Tensor:
        """[B, total] bool: all tokens of all occurrences of the texts.

        In generated text only the last token of an occurrence: when the others are computed, the rest is not known.
        """
        columns = torch.zeros_like(self._real)
        for text in texts:
            for ids in self._texts[text]:
                self._mark(ids, columns)
        return columns

    def _mark(self, text: tuple[int, ...], columns: Tensor) -> None:
        ids = self._ids()
        width = len(text)
        if width > ids.shape[1]:
            return
        starts = (ids.unfold(1, width, 1) == torch.tensor(text)).all(2)  # [B, total - width + 1]
        ends_in_prompt = torch.arange(starts.shape[1]) + width <= self._of.prompt
        in_prompt = starts & ends_in_prompt
        for place in range(width - 1):
            columns[:, place : place + starts.shape[1]] |= in_prompt
        columns[:, width - 1 :] |= starts

    def _of_span(self, name: str, strict: bool) -> Tensor:
        if name not in self._of.spans:
            hint = "the data has no spans: set hooks.spans before each batch"
            if self._of.spans:
                hint = nearest(name, list(self._of.spans))
            raise ValueError(f"tokens: there is no span {name!r}: {hint}")
        bounds = self._of.spans[name]
        bounds = bounds[self._of.samples_of_rows(len(bounds))]
        first = bounds[:, :1]
        end = bounds[:, 1:]
        if self._of.first and (first == TWICE).any():
            raise ValueError(
                f"tokens: span {name!r}: a sample has its text more than once: give token positions in the data, "
                "[first, end]"
            )
        lacks = ((first < 0) | (end <= first) | (end > self._lengths)).squeeze(1)
        if strict and self._of.first and lacks.any():
            self._raise_missing(lacks, f"span {name!r}")
        counted = self._of.positions
        return (counted >= first) & (counted < end) & (first >= 0) & self._in_prompt


def _placeholder_columns(clause: TokenFilter, of: Pass) -> Tensor:
    """[B, total] bool for a trial run: the largest number of columns that the clause may select, at any places."""
    columns = torch.zeros(of.total, dtype=torch.bool)
    if clause.position is None or clause.phase == "generation" or clause.span is not None:
        columns[:] = True
        return columns.expand(of.rows, -1)
    for place in clause.position.places:
        if isinstance(place, int):
            columns[min(max(place, -of.total), of.total - 1)] = True
        else:
            columns[place.start : place.end : place.every] = True
    columns[0] |= not columns.any()
    return columns.expand(of.rows, -1)
