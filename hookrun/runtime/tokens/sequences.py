"""The tokens of the batch under way, pass by pass: which columns a call computes, and what came before them.

A prompt begins a sequence; the passes of a generation go on with it, whether a cache holds what came before or each
pass computes it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils.hooks import RemovableHandle

from hookrun.errors import HookrunError
from hookrun.runtime.checkpointing import repeating
from hookrun.runtime.compiled import tracing
from hookrun.runtime.hooks.base import RegisteredHook
from hookrun.runtime.tokens.calls import CallReader, LabelsReader, Session, Told, session, sources
from hookrun.runtime.tokens.passes import Pass


class _Here(local):
    """What one thread is at.

    current: the pass under way
    latest:  the last pass of each source, by the source's number
    told:    what `hooks.tokens` said last
    labels:  which tokens of the decoder have a label, where the call under way makes them from labels
    """

    current: Pass | None = None
    told: Told | None = None
    labels: Tensor | None = None

    def __init__(self) -> None:
        self.latest = dict[int, Pass]()


class Sequences:
    """Follows the calls of the modules that say which tokens they compute. One per installation.

    spans: name -> [B, 2] int64: first token and end of a span in each sample of the batch, counted from its first
           real token; negative where the sample has none
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._sources = sources(model)
        self._readers = [CallReader(source) for source in self._sources]
        self._here = _Here()
        self._numbered = 0
        self.spans: Mapping[str, Tensor] = {}

    def register(self) -> Iterable[tuple[RegisteredHook, RemovableHandle]]:
        """Follow the calls: before anything else that runs for them."""
        for number, source in enumerate(self._sources):
            begins = _Begins(self, number)
            yield begins, source.register_forward_pre_hook(begins.note, prepend=True, with_kwargs=True)
        if (found := LabelsReader.of(self._model)) is not None:
            module, reader = found
            labelled = _Labelled(self, reader)
            yield labelled, module.register_forward_pre_hook(labelled.note, prepend=True, with_kwargs=True)

    def register_end(self) -> tuple[RegisteredHook, RemovableHandle]:
        """Forget the pass when the model's forward has ended; to be registered after all else."""
        ends = _Ends(self)
        return ends, self._model.register_forward_hook(ends.note, always_call=True)

    @property
    def current(self) -> Pass | None:
        """The pass under way in this thread; without one what `hooks.tokens` said."""
        here = self._here
        if here.current is None and here.told is not None:
            here.current = self._begun(here.told, None, by_hand=True)
        return here.current

    def tell(self, told: Told) -> None:
        """A person says which tokens the next call computes."""
        here = self._here
        here.current, here.told = None, told
        if (
            told.past is not None
            and (earlier := here.latest.get(0)) is not None
            and earlier.total >= told.past
        ):
            here.current = self._continued(earlier, told)
        elif told.past is None:
            here.latest.clear()

    def enter(self, number: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A source is called."""
        here, told = self._here, self._readers[number].read(args, kwargs)
        labels = here.labels
        if number and told is not None and told.mask is None and labels is not None:
            told = replace(told, mask=labels) if labels.shape == (told.rows, told.columns) else told
        running = session(self._model)
        here.current = found = self._next(number, told, running)
        if found is not None:
            here.latest[number] = found
            encoder = here.latest.get(0) if number else None
            found.encoder = None if encoder is None else encoder.seen_by(found)

    def label(self, labels: Tensor | None) -> None:
        """Which tokens of the decoder have a label in the call that begins; None: it does not make them from labels."""
        self._here.labels = labels

    def leave(self) -> None:
        """The model's forward has ended."""
        self._here.current = self._here.labels = None

    def continues(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the call that begins goes on with the sequences of an earlier one."""
        running, latest = session(self._model), self._here.latest
        for number, source in enumerate(self._sources):
            if source is module:
                told = self._readers[number].read(args, kwargs)
                return told is not None and self._earlier(number, told, running) is not None
        return running is not None and any(each.session is running for each in latest.values())

    # ---- from one pass to the next -----------------------------------------------------------------------------

    def _next(self, number: int, told: Told | None, running: Session | None) -> Pass | None:
        here = self._here
        if told is None:
            if here.told is None:
                return None
            return self.current if here.current is not None else self._begun(here.told, None, by_hand=True)
        if not told.real:
            with unset_fake_temporarily():
                return self._made_up(told, number)
        if here.told is not None and here.told.past is not None and here.current is not None:
            return here.current  # said by hand for this very pass
        if (earlier := self._earlier(number, told, running)) is not None:
            return self._continued(earlier, told)
        by_hand = here.told
        if by_hand is None or number:
            return self._begun(told, running, source=number)
        if _same(by_hand, told):
            return self._begun(_joined(by_hand, told), running, by_hand=True)
        if told.mask is None and by_hand.mask is not None:
            raise HookrunError(
                "hooks.tokens told of other tokens than the model is now called with: call it before each batch"
            )
        here.told = None
        return self._begun(told, running)

    def _earlier(self, number: int, told: Told, running: Session | None) -> Pass | None:
        """The pass that the call goes on with, or None where it begins anew."""
        last = self._here.latest.get(number)
        if last is None or last.rows != told.rows or not last.has_data or not told.real:
            return None
        if told.past:
            return last if last.total >= told.past else None
        if running is not None:
            return last if last.session is running and told.columns > last.total else None
        if not last.told or told.past == 0:
            return None
        if told.columns > last.total and last.ids is not None and told.ids is not None:
            return last if torch.equal(told.ids[:, : last.total], last.ids) else None
        return None

    def _begun(self, told: Told, running: Session | None, *, source: int = 0, by_hand: bool = False) -> Pass:
        """The first pass of new sequences; a cache may hold columns that nobody saw, which count as the prompt's."""
        total = (told.past or 0) + told.columns
        if running is not None and running.prompt is not None and running.prompt > total:
            raise HookrunError(
                "`tokens` does not work where a prompt is computed in chunks: leave prefill_chunk_size out"
            )
        known = None if running is None else running.samples
        return Pass(
            told,
            real=_filled(told.mask, None, told.rows, total, told.columns),
            ids=_ids(None, told, total),
            prompt=total,
            new_from=total - told.columns,
            number=self._number(told.rows if known is None else known, source),
            session=running,
            spans={} if source else self.spans,
            by_hand=by_hand,
            decodes=source > 0,
        )

    def _number(self, samples: int, source: int) -> int:
        """Of the first sample of a batch; an encoder and its decoder are called for the same ones."""
        if source and (of_encoder := self._here.latest.get(0)) is not None:
            return of_encoder.number
        self._numbered += samples
        return self._numbered - samples

    def _continued(self, last: Pass, told: Told) -> Pass:
        last.chosen.clear()  # it and its pass hold each other: they would be left to the garbage collector
        past = told.past or 0
        total = past + told.columns
        real = _filled(told.mask, last.real, told.rows, total, told.columns)
        ended = last.ended if past in (0, last.total) else None
        if ended is not None:  # what came after their ends is known, and not said by the mask
            real = torch.cat([last.real, real[:, last.total :]], dim=1)
        return Pass(
            told,
            real=real,
            ids=_ids(last.ids, told, total),
            prompt=min(last.prompt, total),
            new_from=past or last.total,
            number=last.number,
            session=last.session,
            spans=last.spans,
            by_hand=last.told,
            ended=ended,
            decodes=last.decodes,
        )

    def _made_up(self, told: Told, source: int) -> Pass:
        """For a shape check: all tokens are real."""
        return Pass(
            told,
            real=torch.ones(1, told.columns, dtype=torch.bool).expand(told.rows, -1),
            ids=None,
            prompt=told.columns,
            new_from=0,
            number=0,
            session=None,
            spans={},
            by_hand=False,
            decodes=source > 0,
        )


def _same(one: Told, other: Told) -> bool:
    if (one.rows, one.columns) != (other.rows, other.columns):
        return False
    return one.ids is None or other.ids is None or torch.equal(one.ids, other.ids)


def _joined(by_hand: Told, told: Told) -> Told:
    """What a person said of the tokens, and what the call says beside it."""
    mask = by_hand.mask if by_hand.mask is not None else told.mask
    return Told(told.rows, told.columns, by_hand.ids, mask, told.past)


def _filled(mask: Tensor | None, earlier: Tensor | None, rows: int, total: int, columns: int) -> Tensor:
    """[rows, total]: the mask of all columns, of which the call may say none, the last ones or all."""
    if mask is not None and mask.shape[1] == total:
        return mask
    before = total - columns
    if earlier is None or earlier.shape[1] < before:
        known = torch.ones(rows, before, dtype=torch.bool)
    else:
        known = earlier[:, :before]
    if mask is not None and mask.shape[1] == columns:
        return torch.cat([known, mask], dim=1)
    if mask is not None:
        raise HookrunError(
            f"the attention mask has {mask.shape[1]} columns, and there are {total} tokens so far"
        )
    if not before and earlier is not None:  # all is computed again, and the mask is not said again
        return torch.cat([earlier, torch.ones(rows, total - earlier.shape[1], dtype=torch.bool)], dim=1)
    return torch.cat([known, torch.ones(rows, columns, dtype=torch.bool)], dim=1)


def _ids(earlier: Tensor | None, told: Told, total: int) -> Tensor | None:
    """[rows, total]: -1 where a cache holds tokens that nobody saw."""
    if told.ids is None:
        return None
    before = total - told.columns
    if not before:
        return told.ids
    known = earlier[:, :before] if earlier is not None and earlier.shape[1] >= before else None
    unseen = torch.full((told.rows, before), -1, dtype=torch.int64) if known is None else known
    return torch.cat([unseen, told.ids], dim=1)


class _Begins(RegisteredHook):
    """Before a source's forward."""

    def __init__(self, sequences: Sequences | None = None, number: int = 0) -> None:
        super().__init__()
        self._sequences = sequences
        self._number = number

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """torch's forward pre-hook."""
        if self._sequences is not None and not tracing() and repeating() is None:
            self._sequences.enter(self._number, args, kwargs)

    def clear(self) -> None:
        """Follow no longer."""
        self._sequences = None


class _Labelled(RegisteredHook):
    """Before the forward of an encoder-decoder that makes its decoder's tokens from labels."""

    def __init__(self, sequences: Sequences | None = None, reader: LabelsReader | None = None) -> None:
        super().__init__()
        self._sequences, self._reader = sequences, reader

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """torch's forward pre-hook."""
        sequences, reader = self._sequences, self._reader
        if sequences is not None and reader is not None and not tracing() and repeating() is None:
            sequences.label(reader.read(args, kwargs))

    def clear(self) -> None:
        """Follow no longer."""
        self._sequences = None


class _Ends(RegisteredHook):
    """After the model's forward, also where it raised."""

    def __init__(self, sequences: Sequences | None = None) -> None:
        super().__init__()
        self._sequences = sequences

    def note(self, module: nn.Module, args: Any, output: Any) -> None:
        """torch's forward hook."""
        if self._sequences is not None and not tracing() and repeating() is None:
            self._sequences.leave()

    def clear(self) -> None:
        """Follow no longer."""
        self._sequences = None
