"""Tracks the tokens of the current batch from pass to pass: which columns a call computes, and the columns before.

A prompt begins the sequences; the passes of a generation continue them, with a cache or by computing all tokens again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hookrun.engine.runtime.call_stack import CallStack
from hookrun.engine.runtime.checkpointing import repeating
from hookrun.engine.runtime.tokens.calls import (
    CallReader,
    CallTokens,
    Pass,
    Session,
    labelled,
    made_from_labels,
    session,
    sources,
)
from hookrun.errors import HookrunError


class _ThreadState(local):
    """The passes of one thread.

    latest:  the last pass of each source, by the source's number
    given:   the tokens of the last call of `hooks.tokens`
    """

    given: CallTokens | None = None

    def __init__(self) -> None:
        self.latest = dict[int, Pass]()


class Sequences:
    """Follows the calls of the source modules, whose arguments have the tokens. One per installation.

    Of source modules inside each other the outermost one that is called is read. If no module takes `input_ids`, the
    call with which a forward begins is read.

    spans: name -> [B, 2] int64: start and end (excluded) of a span in each sample of the batch, counted from its
           first real token; negative if the sample does not have the span
    copies: how often each call repeats the rows of the batch; a pass has the tokens of the first copy
    """

    def __init__(self, model: nn.Module, calls: CallStack) -> None:
        self._model = model
        self._calls = calls
        self._sources = sources(model)
        if not self._sources:
            calls.begins.append(partial(self.enter, 0, None))
        self._here = _ThreadState()
        self._numbered = 0
        self.spans: Mapping[str, Tensor] = {}
        self.copies = 1

    def readers(self) -> Iterable[tuple[nn.Module, Callable[..., None]]]:
        """Modules with the functions that read their calls."""
        for module, number in self._sources.items():
            yield module, partial(self.enter, number, CallReader(module))
        for module in made_from_labels(self._model):
            yield module, self.label

    @property
    def current(self) -> Pass | None:
        """The current pass in this thread; else a pass with the tokens of `hooks.tokens`; None: not known."""
        given, forward = self._here.given, self._calls.forward
        if forward.tokens is None and given is not None:
            forward.tokens = self._first_pass(given, None, by_hand=True)
        return forward.tokens

    def set_by_hand(self, given: CallTokens) -> None:
        """Set the tokens of the next forward: `hooks.tokens`."""
        self._calls.drop_ended()
        here, forward = self._here, self._calls.forward
        here.given, forward.tokens = given, None
        if (
            given.past is not None
            and (earlier := here.latest.get(0)) is not None
            and earlier.total >= given.past
        ):
            forward.tokens = self._next_pass(earlier, given)
        elif given.past is None:
            here.latest.clear()

    def enter(
        self,
        number: int,
        reader: CallReader | None,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Find the pass of a call of source `number` that begins. A recomputed call belongs to the earlier pass."""
        calls, forward = self._calls.open, self._calls.forward
        if forward.source in calls or repeating() is not None:
            return
        forward.source = calls[-1]
        here, tokens = self._here, (reader or CallReader(module)).read(args, kwargs)
        labels = forward.labels
        if number and tokens is not None and tokens.mask is None and labels is not None:
            tokens = replace(tokens, mask=labels) if labels.shape == (tokens.rows, tokens.columns) else tokens
        if tokens is not None and self.copies > 1:
            tokens = tokens.first(tokens.rows // self.copies)
        running = session(self._model)
        forward.tokens = new = self._find_pass(number, tokens, running)
        if new is not None:
            encodes = not number and 1 in self._sources.values()
            if running is not None and tokens is not None and not encodes:
                new.drafts = _drafts(running, tokens, here.latest.get(number))
            here.latest[number] = new
            encoder = here.latest.get(0) if number else None
            new.encoder = None if encoder is None else encoder.seen_by(new)

    def label(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Read which decoder tokens have a label in the call that begins."""
        if repeating() is None:
            self._calls.forward.labels = labelled(module, args, kwargs)

    def continues(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call of the module with these arguments continues the sequences of an earlier call."""
        running, latest = session(self._model), self._here.latest
        if self._sources and module not in self._sources:
            return running is not None and any(earlier.session is running for earlier in latest.values())
        number = self._sources.get(module, 0)
        tokens = CallReader(module).read(args, kwargs)
        return tokens is not None and self._continued_pass(number, tokens, running) is not None

    # ---- from one pass to the next -----------------------------------------------------------------------------

    def _find_pass(self, number: int, tokens: CallTokens | None, running: Session | None) -> Pass | None:
        here, set_before = self._here, self._calls.forward.tokens
        if tokens is None:
            return self.current if here.given is not None else None
        if not tokens.has_data:
            with unset_fake_temporarily():
                real = torch.ones(1, tokens.columns, dtype=torch.bool).expand(tokens.rows, -1)  # no padding
                return Pass(tokens, real=real, prompt=tokens.columns, decodes=number > 0)
        if here.given is not None and here.given.past is not None and set_before is not None:
            return set_before  # hooks.tokens was called for this pass
        if (earlier := self._continued_pass(number, tokens, running)) is not None:
            if tokens.after_state:  # the state holds what the earlier passes have computed
                tokens = replace(tokens, past=earlier.total)
            return self._next_pass(earlier, tokens)
        given = here.given
        if given is None or number:
            return self._first_pass(tokens, running, source=number)
        if _same(given, tokens):
            mask = given.mask if given.mask is not None else tokens.mask
            return self._first_pass(
                replace(tokens, ids=given.ids, mask=mask, packed=False), running, by_hand=True
            )
        if tokens.mask is None and given.mask is not None:
            raise HookrunError(
                "hooks.tokens was given other tokens than the model is now called with: call it before each batch"
            )
        here.given = None
        return self._first_pass(tokens, running)

    def _continued_pass(self, number: int, tokens: CallTokens, running: Session | None) -> Pass | None:
        """The earlier pass that the call continues, or None if it begins new sequences."""
        last = self._here.latest.get(number)
        if last is None or last.rows != tokens.rows or not last.has_data or not tokens.has_data:
            return None
        if tokens.past:
            return last if last.total >= tokens.past else None
        if running is not None:
            later = tokens.after_state or tokens.columns > last.total
            return last if last.session is running and later else None
        if not last.by_hand or tokens.past == 0:
            return None
        if tokens.columns > last.total and last.ids is not None and tokens.ids is not None:
            return last if torch.equal(tokens.ids[:, : last.total], last.ids) else None
        return None

    def _first_pass(
        self, tokens: CallTokens, running: Session | None, *, source: int = 0, by_hand: bool = False
    ) -> Pass:
        """The first pass of new sequences. Columns in a cache that were not observed count as part of the prompt."""
        total = (tokens.past or 0) + tokens.columns
        if tokens.after_state and not by_hand:
            raise HookrunError(
                "tokens: the call continues from a recurrent state, and it is not known how many tokens that holds: "
                "call hooks.tokens before it, with these tokens and a mask of all tokens so far"
            )
        if running is not None and running.prompt is not None and running.prompt > total:
            hint = "leave prefill_chunk_size out" if running.chunked else "give `generate` all of it at once"
            raise HookrunError(
                f"tokens: a call inside `generate` computes {total} of the prompt's {running.prompt} tokens, and no "
                f"argument says where they are: {hint}"
            )
        known = None if running is None else running.samples
        return Pass(
            tokens,
            real=_filled(tokens.mask, None, tokens.rows, total, tokens.columns),
            ids=None if tokens.ids is None else _behind(None, total - tokens.columns, tokens.ids, unknown=-1),
            prompt=total,
            new_from=total - tokens.columns,
            number=self._number(tokens.rows if known is None else known, source),
            session=running,
            spans={} if source else self.spans,
            by_hand=by_hand,
            decodes=source > 0,
        )

    def _number(self, samples: int, source: int) -> int:
        """The number of the first sample of a batch; a decoder has the samples of its encoder."""
        if source and (of_encoder := self._here.latest.get(0)) is not None:
            return of_encoder.number
        self._numbered += samples
        return self._numbered - samples

    def _next_pass(self, last: Pass, tokens: CallTokens) -> Pass:
        """The pass that continues `last` with the tokens of a call."""
        last.chosen.clear()  # breaks a reference cycle between the pass and its selections
        past = tokens.past or 0
        total = past + tokens.columns
        real = _filled(tokens.mask, last.real, tokens.rows, total, tokens.columns)
        ended = last.ended if past in (0, last.total) else None
        if ended is not None:  # the mask does not have the padding after end-of-text tokens, `last.real` has
            real = torch.cat([last.real, real[:, last.total :]], dim=1)
        return Pass(
            tokens,
            real=real,
            ids=None if tokens.ids is None else _behind(last.ids, past, tokens.ids, unknown=-1),
            prompt=min(last.prompt, total),
            new_from=past or last.total,
            number=last.number,
            session=last.session,
            spans=last.spans,
            by_hand=last.by_hand,
            ended=ended,
            decodes=last.decodes,
        )


def _drafts(running: Session, tokens: CallTokens, last: Pass | None) -> bool:
    """Whether the call computes candidates: more tokens than the prompt at first, or a cache that has shrunk."""
    if running.drafts:
        return True
    if last is None or last.session is not running:
        longer = running.prompt is not None and tokens.columns > running.prompt
        return longer and tokens.ids is not None and not tokens.past
    return last.drafts or (tokens.past is not None and 0 < tokens.past < last.total)


def _same(one: CallTokens, other: CallTokens) -> bool:
    return (one.rows, one.columns) == (other.rows, other.columns) and (
        one.ids is None or other.ids is None or torch.equal(one.ids, other.ids)
    )


def _filled(mask: Tensor | None, earlier: Tensor | None, rows: int, total: int, columns: int) -> Tensor:
    """[rows, total]: the mask of all columns. The call's mask may have all columns, only the last ones, or be None."""
    before = total - columns
    if mask is not None:
        if mask.shape[1] == total:
            return mask
        if mask.shape[1] != columns:
            raise HookrunError(
                f"the attention mask has {mask.shape[1]} columns, and there are {total} tokens so far"
            )
    elif not before and earlier is not None:  # all columns are computed again, without a mask in this call
        return torch.cat([earlier, torch.ones(rows, total - earlier.shape[1], dtype=torch.bool)], dim=1)
    new = torch.ones(rows, columns, dtype=torch.bool) if mask is None else mask
    return _behind(earlier, before, new, unknown=1)


def _behind(earlier: Tensor | None, before: int, new: Tensor, *, unknown: int) -> Tensor:
    """[rows, before + columns]: the new columns behind those of earlier passes, or behind tokens not observed."""
    if earlier is None or earlier.shape[1] < before:
        earlier = new.new_full((len(new), before), unknown)
    return torch.cat([earlier[:, :before], new], dim=1)
