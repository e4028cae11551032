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

from hookrun.engine.runtime.call_stack import CallStack, drop_ended
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
        self._state = _ThreadState()
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
        given = self._state.given
        forward = self._calls.forward
        if forward.tokens is None and given is not None:
            forward.tokens = self._first_pass(given, None, by_hand=True)
        return forward.tokens

    def set_by_hand(self, given: CallTokens) -> None:
        """Set the tokens of the next forward: `hooks.tokens`."""
        drop_ended()
        state = self._state
        forward = self._calls.forward
        state.given = given
        forward.tokens = None
        if given.past is None:
            state.latest.clear()
            return
        earlier = state.latest.get(0)
        if earlier is not None and earlier.total >= given.past:
            forward.tokens = self._next_pass(earlier, given)

    def enter(
        self,
        number: int,
        reader: CallReader | None,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Find the pass of a call of source `number` that begins. A recomputed call belongs to the earlier pass."""
        forward = self._calls.forward
        if forward.source is not None or repeating() is not None:
            return
        forward.source = self._calls.innermost
        latest = self._state.latest
        tokens = self._read(number, reader or CallReader(module), args, kwargs)
        running = session(self._model)
        forward.tokens = new = self._find_pass(number, tokens, running)
        if new is None:
            return
        encodes = number == 0 and 1 in self._sources.values()
        if running is not None and tokens is not None and not encodes:
            new.drafts = _drafts(running, tokens, latest.get(number))
        latest[number] = new
        encoder = latest.get(0)
        if number and encoder is not None:
            new.encoder = encoder.seen_by(new)

    def _read(
        self, number: int, reader: CallReader, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> CallTokens | None:
        """The tokens of a call of source `number`: those of the first copy of the batch, without labels padding."""
        tokens = reader.read(args, kwargs)
        if tokens is None:
            return None
        labels = self._calls.forward.labels
        fits = labels is not None and labels.shape == (tokens.rows, tokens.columns)
        if number and tokens.mask is None and fits:
            tokens = replace(tokens, mask=labels)
        if self.copies > 1:
            tokens = tokens.first(tokens.rows // self.copies)
        return tokens

    def label(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Read which decoder tokens have a label in the call that begins."""
        if repeating() is None:
            self._calls.forward.labels = labelled(module, args, kwargs)

    def continues(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call of the module with these arguments continues the sequences of an earlier call."""
        running = session(self._model)
        if self._sources and module not in self._sources:
            if running is None:
                return False
            return any(earlier.session is running for earlier in self._state.latest.values())
        tokens = CallReader(module).read(args, kwargs)
        if tokens is None:
            return False
        return self._continued_pass(self._sources.get(module, 0), tokens, running) is not None

    # ---- from one pass to the next -----------------------------------------------------------------------------

    def _find_pass(self, number: int, tokens: CallTokens | None, running: Session | None) -> Pass | None:
        state = self._state
        given = state.given
        set_before = self._calls.forward.tokens
        if tokens is None:
            return None if given is None else self.current
        if not tokens.has_data:
            with unset_fake_temporarily():
                real = torch.ones(1, tokens.columns, dtype=torch.bool).expand(tokens.rows, -1)  # no padding
                return Pass(tokens, real=real, prompt=tokens.columns, decodes=number > 0)
        if given is not None and given.past is not None and set_before is not None:
            return set_before  # hooks.tokens was called for this pass
        earlier = self._continued_pass(number, tokens, running)
        if earlier is not None:
            if tokens.after_state:  # the state holds what the earlier passes have computed
                tokens = replace(tokens, past=earlier.total)
            return self._next_pass(earlier, tokens)
        if given is None or number:
            return self._first_pass(tokens, running, source=number)
        if _same(given, tokens):
            mask = tokens.mask if given.mask is None else given.mask
            tokens = replace(tokens, ids=given.ids, mask=mask, packed=False)
            return self._first_pass(tokens, running, by_hand=True)
        if tokens.mask is None and given.mask is not None:
            raise HookrunError(
                "hooks.tokens was given other tokens than the model is now called with: call it before each batch"
            )
        state.given = None
        return self._first_pass(tokens, running)

    def _continued_pass(self, number: int, tokens: CallTokens, running: Session | None) -> Pass | None:
        """The earlier pass that the call continues, or None if it begins new sequences."""
        last = self._state.latest.get(number)
        if last is None or last.rows != tokens.rows or not last.has_data or not tokens.has_data:
            return None
        if tokens.past:
            continues = last.total >= tokens.past
        elif running is not None:
            is_longer = tokens.after_state or tokens.columns > last.total
            continues = last.session is running and is_longer
        else:
            continues = last.by_hand and tokens.past is None and _repeats(last, tokens)
        return last if continues else None

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
        samples = tokens.rows
        if running is not None and running.samples is not None:
            samples = running.samples
        past = total - tokens.columns
        return Pass(
            tokens,
            real=_filled(tokens.mask, None, tokens.rows, total, tokens.columns),
            ids=_ids_so_far(None, past, tokens),
            prompt=total,
            new_from=past,
            number=self._number(samples, source),
            session=running,
            spans={} if source else self.spans,
            by_hand=by_hand,
            decodes=source > 0,
        )

    def _number(self, samples: int, source: int) -> int:
        """The number of the first sample of a batch; a decoder has the samples of its encoder."""
        encoder = self._state.latest.get(0)
        if source and encoder is not None:
            return encoder.number
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
            ids=_ids_so_far(last.ids, past, tokens),
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
        is_longer = running.prompt is not None and tokens.columns > running.prompt
        return is_longer and tokens.ids is not None and not tokens.past
    has_shrunk = tokens.past is not None and 0 < tokens.past < last.total
    return last.drafts or has_shrunk


def _same(one: CallTokens, other: CallTokens) -> bool:
    if one.rows != other.rows or one.columns != other.columns:
        return False
    return one.ids is None or other.ids is None or torch.equal(one.ids, other.ids)


def _repeats(last: Pass, tokens: CallTokens) -> bool:
    """Whether the call computes all tokens of the last pass again, and further ones."""
    if tokens.columns <= last.total or last.ids is None or tokens.ids is None:
        return False
    return torch.equal(tokens.ids[:, : last.total], last.ids)


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
        new = torch.ones(rows, total - earlier.shape[1], dtype=torch.bool)
        return torch.cat([earlier, new], dim=1)
    if mask is None:
        mask = torch.ones(rows, columns, dtype=torch.bool)
    return _behind(earlier, before, mask, unknown=1)


def _ids_so_far(earlier: Tensor | None, before: int, tokens: CallTokens) -> Tensor | None:
    """[rows, before + columns]: the ids of all columns, -1 for those that were not observed; None: not known."""
    if tokens.ids is None:
        return None
    return _behind(earlier, before, tokens.ids, unknown=-1)


def _behind(earlier: Tensor | None, before: int, new: Tensor, *, unknown: int) -> Tensor:
    """[rows, before + columns]: the new columns behind those of earlier passes, or behind tokens not observed."""
    if earlier is None or earlier.shape[1] < before:
        earlier = new.new_full((len(new), before), unknown)
    return torch.cat([earlier[:, :before], new], dim=1)
