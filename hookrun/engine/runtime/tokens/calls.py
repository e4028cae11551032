"""Reads the tokens of a model call from its arguments, by their names; `Pass`: the tokens of one call of the model."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
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
        mask = as_mask(attention_mask, rows, None)
        past = None
        if mask is not None and mask.shape[1] != columns:
            past = mask.shape[1] - columns
        return cls(rows, columns, on_cpu(input_ids), mask, past)

    def first(self, rows: int) -> CallTokens:
        """The tokens of the first rows."""
        ids = self.ids
        mask = self.mask
        if ids is not None:
            ids = ids[:rows]
        if mask is not None:
            mask = mask[:rows]
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
        given = _by_name(self._names, args, kwargs)
        ids = given.get(IDS)
        embeds = given.get(EMBEDS)
        if not isinstance(ids, Tensor) and not self.by_name:
            ids = _whole_plane(args, kwargs)
        if isinstance(ids, Tensor) and ids.dim() == 2:
            rows, columns = ids.shape
        elif isinstance(embeds, Tensor) and embeds.dim() == 3:
            ids = None
            rows, columns = embeds.shape[:2]
        else:
            return None
        for tensor in (ids, embeds):
            if isinstance(tensor, Tensor) and not holds_data(tensor):
                return CallTokens(rows, columns, has_data=False)
        past, after_state = _past(given)
        raw: Any = given.get(MASK)
        has_plain_mask = isinstance(raw, Tensor) and raw.dim() == 2
        if ids is not None and has_plain_mask and holds_data(raw):
            ids, raw = read_together([ids, raw])
        mask = as_mask(raw, rows, None if past is None else past + columns)
        if past is None and mask is not None and mask.shape[1] > columns:
            past = mask.shape[1] - columns
            after_state = False
        packed = False
        if not past and not has_plain_mask:
            mask, packed = _by_positions(given.get(POSITIONS), mask, rows, columns)
        if ids is not None:
            ids = on_cpu(ids)
        return CallTokens(rows, columns, ids, mask, past, packed=packed, after_state=after_state)


def _by_name(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name. names: those of the positional ones."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _whole_plane(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The first integer tensor [B, T] among the arguments, mask and positions left out."""
    others = [value for name, value in kwargs.items() if name not in (MASK, POSITIONS)]
    for tensor in tensors((args, others)):
        if tensor.dim() == 2 and tensor.dtype in (torch.int64, torch.int32):
            return tensor
    return None


def made_from_labels(model: nn.Module) -> list[nn.Module]:
    """The modules that make their decoder's tokens from labels."""
    needed = {LABELS, DECODER_IDS, DECODER_MASK}
    return [module for module in model.modules() if needed <= parameters_of(module).keys()]


def labelled(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """[B, T] bool on the CPU: the decoder's tokens that have a label; the others are padding.

    None if the call has decoder arguments, or no labels.
    """
    given = _by_name(positional(module), args, kwargs)
    for name in (DECODER_IDS, DECODER_MASK, "decoder_inputs_embeds"):
        if given.get(name) is not None:
            return None
    labels = given.get(LABELS)
    if not isinstance(labels, Tensor) or labels.dim() != 2 or not holds_data(labels):
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
        if raw.is_floating_point():
            raw = raw > _MASKED
        raw = (raw != 0)[:, 0].any(1)
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
    differs = (positions != positions[:, :1]) | (positions > 1)
    if bool((before & differs).any()):
        return None, True
    if bool(before.any()):
        return ~before, False
    return None, False


def _past(given: Mapping[str, Any]) -> tuple[int | None, bool]:
    """How many columns the call's cache holds, None if no argument says it; and whether a state holds some others."""
    for name in CACHES:
        cache = given.get(name)
        if cache is not None:
            break
    else:
        return None, given.get(STATE) is not None
    length = getattr(cache, "get_seq_length", None)
    if callable(length):
        try:
            return int(length()), False
        except ValueError:  # of transformers, for a cache of recurrent layers alone
            if cache.has_previous_state():
                return None, True
            return 0, False
    keys = next(tensors(cache), None)  # keys [B, H, S, width]
    if keys is None or keys.dim() < 2:
        return None, False
    return int(keys.shape[-2]), False


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
    numbers: dict[nn.Module, int] = {}
    for number, outermost in enumerate(_outermost_sources(model, set())):
        for module in outermost.modules():
            if module is outermost or IDS in parameters_of(module):
                numbers[module] = number
    return numbers


def _outermost_sources(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """The outermost modules that take `input_ids`, in the order of the model; both parts of an encoder-decoder."""
    if module in seen:
        return
    seen.add(module)
    names = parameters_of(module)
    if IDS not in names:
        for child in module.children():
            yield from _outermost_sources(child, seen)
        return
    parts = _encoder_and_decoder(module) if DECODER_IDS in names else []
    yield from parts or [module]


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
    """The `generate` call that this model call is part of (from the stack), or None; the same object in each pass.

    It is kept as a variable of the `generate` call: in a table it would outlive the call, or with the frame as its key
    keep the call's cache alive.
    """
    for frame in outward(sys._getframe(1)):
        if frame.f_code.co_name == _GENERATES and _belong_together(frame.f_locals.get("self"), model):
            running = frame.f_locals.get(_SESSION)
            if not isinstance(running, Session):
                running = frame.f_locals[_SESSION] = _new_session(frame)
            return running
    return None


def _belong_together(owner: Any, model: nn.Module) -> bool:
    """Whether the owner of a method is the model, a part of it, or a wrapper of it."""
    if not isinstance(owner, nn.Module):
        return False
    return any(module is owner for module in model.modules()) or any(
        module is model for module in owner.modules()
    )


def _new_session(frame: FrameType) -> Session:
    variables = frame.f_locals
    ids = variables.get(IDS)
    prompt = None
    if isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1]:
        prompt = ids.shape[1]
    config = variables.get("generation_config") or getattr(variables.get("self"), "generation_config", None)
    eos = whole_numbers(getattr(config, "eos_token_id", None))
    samples = variables.get("batch_size")
    return Session(
        prompt,
        () if eos is None else tuple(eos.flatten().tolist()),
        samples if isinstance(samples, int) else None,
        chunked=getattr(config, "prefill_chunk_size", None) is not None,
        drafts=_is_speculative(frame),
    )


def _is_speculative(frame: FrameType) -> bool:
    """Whether a `generate` call is a speculative decoding, or that of the model that drafts, inside it."""
    for call in outward(frame):
        if call.f_code.co_name == _GENERATES and call.f_locals.get("generation_mode") == _SPECULATIVE:
            return True
    return False


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
        self.rows = tokens.rows
        self.columns = tokens.columns
        self.has_data = tokens.has_data
        self.packed = tokens.packed
        self.real = real
        self.total = real.shape[1]
        self.prompt = prompt
        self.ids = ids
        self.new_from = new_from
        self.number = number
        self.session = session
        self.goes_on = session is not None
        self.spans = spans
        self.by_hand = by_hand
        self.ended = ended
        self.decodes = decodes
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
        seen.__dict__.pop("positions", None)
        seen.chosen = {}
        if decoder.rows % self.rows == 0:
            times = decoder.rows // self.rows
            seen.rows = self.rows * times
            seen.real = self.real.repeat_interleave(times, 0)
            if self.ids is not None:
                seen.ids = self.ids.repeat_interleave(times, 0)
        if decoder.new_from:
            seen.new_from = self.total
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
