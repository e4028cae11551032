"""Reads the tokens of a model call from its arguments, by their names; `Pass`: the tokens of one call of the model."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from hookrun.engine.runtime.frames import outward
from hookrun.engine.values.containers import tensors
from hookrun.engine.values.tensors import holds_data, read_together, whole_numbers

IDS, EMBEDS, MASK, POSITIONS = "input_ids", "inputs_embeds", "attention_mask", "position_ids"
DECODER_IDS, DECODER_MASK = "decoder_input_ids", "decoder_attention_mask"
LABELS = "labels"
NO_LABEL = -100
"""The label that models of transformers leave out of the loss and turn into padding."""
CACHES = ("past_key_values", "past_key_value", "cache", "cache_params")
STATE = "state"
"""The name of the argument with the state of a recurrent model."""
_MASKED = -1000.0
"""What is added to masked scores is less, to others more: 0, or a bias such as ALiBi's."""
_GENERATES = "generate"
"""The name of the method that runs a generation."""

_SPECULATIVE = "assisted_generation"
"""The mode of transformers for an assistant model, prompt lookup, early exit, and heads that predict several tokens."""

_SESSION = "_hookrun_session"
"""The name of a local variable that is added to the frame of a running `generate`, to recognize it in later passes."""


@dataclass(frozen=True, slots=True)
class CallTokens:
    """The tokens of one call, as its arguments or `hooks.tokens` give them.

    rows, columns: the shape [B, T] of the tokens that the call computes
    ids:      [B, T] int64 on the CPU; None: not known
    mask:     [B, S] bool on the CPU, False for padding; S > T if it covers the tokens in a cache too; None: not given
    past:     how many columns a cache holds; None: not given
    has_data: the tensors have values; False in a trial run
    packed:   a row holds several sequences: its position ids start again at 0
    after_state: a recurrent state holds columns before these, and it is not known how many
    """

    rows: int
    columns: int
    ids: Tensor | None = None
    mask: Tensor | None = None
    past: int | None = None
    has_data: bool = True
    packed: bool = False
    after_state: bool = False

    @classmethod
    def of(cls, input_ids: Tensor, attention_mask: Tensor | None = None) -> CallTokens:
        """From the arguments of `hooks.tokens`: ids [B, T], and a mask [B, S], wider if a cache has earlier tokens."""
        rows, columns = input_ids.shape
        mask = None if attention_mask is None else as_mask(attention_mask, rows, None)
        past = None if mask is None or mask.shape[1] == columns else mask.shape[1] - columns
        return cls(rows, columns, on_cpu(input_ids), mask, past)

    def first(self, rows: int) -> CallTokens:
        """The tokens of the first rows."""
        ids, mask = (None if each is None else each[:rows] for each in (self.ids, self.mask))
        return replace(self, rows=rows, ids=ids, mask=mask)


def on_cpu(tensor: Tensor) -> Tensor:
    """A copy on the CPU as int64; later in-place writes do not change it."""
    return tensor.to(device="cpu", dtype=torch.int64, copy=True)


class CallReader:
    """Reads the tokens of the calls of one module.

    by_name: its forward has an argument `input_ids`; else the first integer tensor [B, T] among the arguments is taken
    """

    def __init__(self, module: nn.Module) -> None:
        self._names = positional(module)
        self.by_name = IDS in parameters_of(module)

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallTokens | None:
        """The tokens of a call with these arguments; None if there are none among them."""
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        ids = given.get(IDS)
        if not isinstance(ids, Tensor) and not self.by_name:
            others = [value for name, value in kwargs.items() if name not in (MASK, POSITIONS)]
            plane = (tensor for tensor in tensors((args, others)) if tensor.dim() == 2)
            ids = next((tensor for tensor in plane if tensor.dtype in (torch.int64, torch.int32)), None)
        embeds = given.get(EMBEDS)
        if isinstance(ids, Tensor) and ids.dim() == 2:
            rows, columns = ids.shape
        elif isinstance(embeds, Tensor) and embeds.dim() == 3:
            ids, (rows, columns) = None, embeds.shape[:2]
        else:
            return None
        if not all(holds_data(tensor) for tensor in (ids, embeds) if isinstance(tensor, Tensor)):
            return CallTokens(rows, columns, has_data=False)
        past, after_state = _past(given)
        raw = given.get(MASK)
        if ids is not None and isinstance(raw, Tensor) and raw.dim() == 2 and holds_data(raw):
            ids, raw = read_together([ids, raw])
        mask = as_mask(raw, rows, None if past is None else past + columns)
        if past is None and mask is not None and mask.shape[1] > columns:
            past, after_state = mask.shape[1] - columns, False
        packed = False
        if not past and not (isinstance(raw, Tensor) and raw.dim() == 2):
            mask, packed = _by_positions(given.get(POSITIONS), mask, rows, columns)
        ids = None if ids is None else on_cpu(ids)
        return CallTokens(rows, columns, ids, mask, past, packed=packed, after_state=after_state)


def made_from_labels(model: nn.Module) -> list[nn.Module]:
    """The modules that make their decoder's tokens from labels."""
    needed = {LABELS, DECODER_IDS, DECODER_MASK}
    return [module for module in model.modules() if needed <= parameters_of(module).keys()]


def labelled(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """[B, T] bool on the CPU: the decoder's tokens that have a label; the others are padding.

    None if the call has decoder arguments, or no labels.
    """
    given = {**dict(zip(positional(module), args, strict=False)), **kwargs}
    labels = given.get(LABELS)
    told = any(given.get(name) is not None for name in (DECODER_IDS, DECODER_MASK, "decoder_inputs_embeds"))
    if told or not isinstance(labels, Tensor) or labels.dim() != 2 or not holds_data(labels):
        return None
    return labels.detach().to("cpu") != NO_LABEL


def as_mask(raw: Any, rows: int, width: int | None) -> Tensor | None:
    """[B, S] bool on the CPU, False for padding. None for masks of other shapes than [B, S] and [B, 1, T, W].

    width: the number of columns so far, which a mask for a cache of fixed size exceeds; None: all columns of the mask
    """
    if isinstance(raw, Mapping):  # models with several kinds of layers have a mask for each kind
        raw = raw.get("full_attention", next(iter(raw.values()), None))
    if not isinstance(raw, Tensor) or not holds_data(raw):
        return None
    if raw.dim() == 4:  # a key is real if any query may attend to it
        if width is not None and raw.shape[-1] < width:  # it covers only the window that a cache holds
            return None
        allowed = raw > _MASKED if raw.is_floating_point() else raw != 0
        raw = allowed[:, 0].any(1)
    if raw.dim() != 2:
        return None
    return (raw != 0).to("cpu")[:, :width].expand(rows, -1)


def _by_positions(raw: Any, mask: Tensor | None, rows: int, columns: int) -> tuple[Tensor | None, bool]:
    """The mask, or the one that follows from position ids [B, T], and whether rows hold several sequences.

    Without a mask a sequence begins at the last 0 of its row. Left padding before it has position 0 everywhere or 1
    everywhere; any other positions before it belong to further sequences. The mask is None if there is no padding.
    """
    if not isinstance(raw, Tensor) or raw.dim() != 2 or raw.shape[1] != columns or not holds_data(raw):
        return mask, False
    positions = on_cpu(raw).expand(rows, -1)
    if mask is not None:
        return mask, bool((mask & (positions == 0) & (mask.cumsum(1) > 1)).any())
    at = torch.arange(columns)
    start = torch.where(positions == 0, at, 0).amax(1, keepdim=True)
    before = at < start
    first = positions[:, :1]
    if not bool((before & ((positions != first) | (positions > 1))).any()):
        return (~before if bool(before.any()) else None), False
    return None, True


def _past(given: Mapping[str, Any]) -> tuple[int | None, bool]:
    """How many columns the call's cache holds, None if no argument says it; and whether a state holds some others."""
    cache = next((given[name] for name in CACHES if given.get(name) is not None), None)
    if cache is None:
        return None, given.get(STATE) is not None
    if callable(length := getattr(cache, "get_seq_length", None)):
        try:
            return int(length()), False
        except ValueError:  # of transformers, for a cache of recurrent layers alone
            return (None, True) if cache.has_previous_state() else (0, False)
    keys = next(tensors(cache), None)  # keys [B, H, S, width]
    return (None if keys is None or keys.dim() < 2 else int(keys.shape[-2])), False


# ---- the signature ---------------------------------------------------------------------------------------------


def parameters_of(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of the module's forward; empty if Python cannot determine them."""
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return {}


def positional(module: nn.Module) -> tuple[str, ...]:
    """The names of the positional arguments of the module's forward, in order."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, parameter in parameters_of(module).items() if parameter.kind in kinds)


def sources(model: nn.Module) -> dict[nn.Module, int]:
    """The modules whose calls are read for tokens, each with the number of the sequences that it takes.

    These are the outermost modules whose forward takes `input_ids`, and those inside them that may be called instead;
    encoder and decoder instead of an encoder-decoder. Empty if there is no such module.
    """
    outermost, seen, ahead = list[nn.Module](), set[int](), [model]
    while ahead:
        module = ahead.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        names = parameters_of(module)
        if IDS in names:
            outermost.extend((_encoder_and_decoder(module) if DECODER_IDS in names else []) or [module])
        else:
            ahead += reversed(list(module.children()))  # in the order of the model
    return {
        each: number
        for number, module in enumerate(outermost)
        for each in module.modules()
        if each is module or IDS in parameters_of(each)
    }


def _encoder_and_decoder(module: nn.Module) -> list[nn.Module]:
    parts = []
    for part in ("encoder", "decoder"):
        getter = getattr(module, f"get_{part}", None)
        submodule = getter() if callable(getter) else getattr(module, part, None)
        if isinstance(submodule, nn.Module) and submodule is not module:
            parts.append(submodule)
    return parts if len(parts) == 2 else []


# ---- generation ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Session:
    """One call of a `generate` method of the model.

    prompt:  the number of columns of its prompt; None: not known
    eos:     the tokens that end a sequence; they and later tokens count as padding
    samples: the number of its prompts, each of which may have several sequences (beams); None: not known
    chunked: its prompt is computed in chunks
    drafts:  it is a speculative decoding, or part of one: passes compute candidates that may be rejected
    """

    prompt: int | None
    eos: tuple[int, ...]
    samples: int | None
    chunked: bool = False
    drafts: bool = False


def session(model: nn.Module) -> Session | None:
    """The `generate` call that this model call is part of (from the stack), or None; the same object in each pass."""
    for frame in outward(sys._getframe(1)):
        owner = frame.f_locals.get("self") if frame.f_code.co_name == _GENERATES else None
        if isinstance(owner, nn.Module) and (  # the model, a part of it or a wrapper of it
            any(module is owner for module in model.modules())
            or any(module is model for module in owner.modules())
        ):
            known = frame.f_locals.get(_SESSION)
            if not isinstance(known, Session):
                known = frame.f_locals[_SESSION] = _new_session(frame)
            return known
    return None


def _new_session(frame: FrameType) -> Session:
    local = frame.f_locals
    ids = local.get(IDS)
    prompt = ids.shape[1] if isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] else None
    config = local.get("generation_config") or getattr(local.get("self"), "generation_config", None)
    eos = whole_numbers(getattr(config, "eos_token_id", None))
    samples = local.get("batch_size")
    return Session(
        prompt,
        () if eos is None else tuple(eos.flatten().tolist()),
        samples if isinstance(samples, int) else None,
        chunked=getattr(config, "prefill_chunk_size", None) is not None,
        drafts=any(  # also for the model that drafts, whose `generate` is called by that of the other one
            call.f_locals.get("generation_mode") == _SPECULATIVE
            for call in outward(frame)
            if call.f_code.co_name == _GENERATES
        ),
    )


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
    drafts:    it computes candidates of a speculative decoding, which may be rejected
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
            self._mark_ended(ids, session.eos)
        self.encoder: Pass | None = None
        self.drafts = False
        self.chosen = dict[Any, Any]()

    def _mark_ended(self, ids: Tensor, eos: tuple[int, ...]) -> None:
        """Make generated tokens padding from the end-of-text token on; `ended` has the ends in earlier passes."""
        start = max(self.prompt, self.new_from)
        hits = torch.isin(ids[:, start:], torch.tensor(eos, device="cpu"))
        if self.ended is None and not hits.any():
            return
        ended = hits.cumsum(1) > 0
        if self.ended is not None:
            ended |= self.ended[:, None]
        self.real = torch.cat([self.real[:, :start], self.real[:, start:] & ~ended], dim=1)
        self.ended = ended[:, -1]

    @cached_property
    def positions(self) -> Tensor:
        """[B, total] int64: positions, counted from the first real token; padding has that of the token before it."""
        return self.real.cumsum(1) - 1

    @property
    def first(self) -> bool:
        """Whether the pass computes the prompt, or a part of it, for the first time."""
        return self.new_from < self.prompt

    def seen_by(self, decoder: Pass) -> Pass:
        """This encoder pass for cross-attention modules of a decoder pass: a row for each row of the decoder."""
        seen = copy(self)
        times = decoder.rows // self.rows if decoder.rows % self.rows == 0 else 1
        seen.rows = self.rows * times
        seen.real = self.real.repeat_interleave(times, 0)
        seen.__dict__.pop("positions", None)
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
