"""What one call of a model says about its tokens: read off its arguments, by their names."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from hookrun.actions.tensors import holds_data
from hookrun.containers import tensors

IDS, EMBEDS, MASK, POSITIONS = "input_ids", "inputs_embeds", "attention_mask", "position_ids"
DECODER_IDS, DECODER_MASK = "decoder_input_ids", "decoder_attention_mask"
LABELS = "labels"
NO_LABEL = -100
"""What models of transformers leave out of their loss, and make padding of."""
CACHES = ("past_key_values", "past_key_value", "cache_params")
_GENERATES = "generate"
"""The name of the method that runs a generation."""

_SESSION = "_hookrun_session"
"""A name among the locals of a `generate` under way, under which it is known again at its next pass."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a call says of its tokens.

    rows, columns: of what it computes, [B, T]
    ids:  [B, T] int64 on the CPU; None: not known
    mask: [B, S] bool on the CPU, real tokens and not padding, S >= T with what a cache holds; None: not said
    past: how many columns a cache holds; None: not said
    real: the tensors hold values; False in a shape check
    packed: a row holds several sequences, as position ids that begin again at 0 say
    """

    rows: int
    columns: int
    ids: Tensor | None = None
    mask: Tensor | None = None
    past: int | None = None
    real: bool = True
    packed: bool = False

    @classmethod
    def of(cls, input_ids: Tensor, attention_mask: Tensor | None = None) -> Told:
        """What a person says: ids [B, T], and a mask [B, S] that is wider where a cache holds earlier tokens."""
        rows, columns = input_ids.shape
        mask = None if attention_mask is None else as_mask(attention_mask, rows, None)
        past = None if mask is None or mask.shape[1] == columns else mask.shape[1] - columns
        return cls(rows, columns, on_cpu(input_ids), mask, past)


def on_cpu(tensor: Tensor) -> Tensor:
    """A copy that later writes do not reach."""
    return tensor.to(device="cpu", dtype=torch.int64, copy=True)


class CallReader:
    """Reads the calls of one module.

    by_name: its forward names `input_ids`; else its first tensor [B, T] of whole numbers holds the ids
    """

    def __init__(self, module: nn.Module) -> None:
        self._names = positional(module)
        self.by_name = IDS in parameters_of(module)

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Told | None:
        """What the call says; None where it has no tokens."""
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        ids = given.get(IDS)
        if not isinstance(ids, Tensor) and not self.by_name:
            ids = next((each for each in tensors((args, _without_mask(kwargs))) if _like_ids(each)), None)
        embeds = given.get(EMBEDS)
        if isinstance(ids, Tensor) and ids.dim() == 2:
            rows, columns = ids.shape
        elif isinstance(embeds, Tensor) and embeds.dim() == 3:
            ids, (rows, columns) = None, embeds.shape[:2]
        else:
            return None
        if not all(holds_data(each) for each in (ids, embeds) if isinstance(each, Tensor)):
            return Told(rows, columns, real=False)
        past = _past(given)
        raw = given.get(MASK)
        mask = as_mask(raw, rows, None if past is None else past + columns) if raw is not None else None
        if past is None and mask is not None and mask.shape[1] > columns:
            past = mask.shape[1] - columns
        packed = False
        if raw is None and not past:
            mask, packed = _by_positions(given.get(POSITIONS), rows, columns)
        return Told(rows, columns, None if ids is None else on_cpu(ids), mask, past, packed=packed)


class LabelsReader:
    """Reads of the calls of an encoder-decoder which of its decoder's tokens, made from `labels`, are padding."""

    def __init__(self, module: nn.Module) -> None:
        self._names = positional(module)

    @classmethod
    def of(cls, model: nn.Module) -> tuple[nn.Module, LabelsReader] | None:
        """For the outermost module that makes its decoder's tokens from labels; None: there is none."""
        needed = {LABELS, DECODER_IDS, DECODER_MASK}
        module = next((each for each in model.modules() if needed <= parameters_of(each).keys()), None)
        return None if module is None else (module, cls(module))

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """[B, T] bool on the CPU: tokens for which there is a label. None where the call says it itself, or nothing."""
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        labels = given.get(LABELS)
        said = any(
            given.get(name) is not None for name in (DECODER_IDS, DECODER_MASK, "decoder_inputs_embeds")
        )
        if said or not isinstance(labels, Tensor) or labels.dim() != 2 or not holds_data(labels):
            return None
        return labels.detach().to("cpu") != NO_LABEL


def _without_mask(kwargs: Mapping[str, Any]) -> list[Any]:
    return [value for name, value in kwargs.items() if name not in (MASK, POSITIONS)]


def _like_ids(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and tensor.dtype in (torch.int64, torch.int32)


def as_mask(raw: Any, rows: int, width: int | None) -> Tensor | None:
    """[B, S] bool on the CPU: real tokens. None for masks of other forms than [B, S] and [B, 1, T, W].

    width: how many columns there are so far, where a cache of fixed size has more; None: all
    """
    if isinstance(raw, Mapping):  # of layers of several kinds
        raw = raw.get("full_attention", next(iter(raw.values()), None))
    if not isinstance(raw, Tensor) or not holds_data(raw):
        return None
    if raw.dim() == 4:  # what the last query of each row may attend to
        last = raw[:, 0, -1]
        raw = last if last.dtype == torch.bool else last == 0
    if raw.dim() != 2:
        return None
    mask: Tensor = (raw != 0).to("cpu")
    mask = mask if width is None or mask.shape[1] <= width else mask[:, :width]
    return mask if mask.shape[0] == rows else mask.expand(rows, -1)


def _by_positions(raw: Any, rows: int, columns: int) -> tuple[Tensor | None, bool]:
    """The mask that position ids [B, T] stand for where a call has no other, and whether rows hold several sequences.

    A sequence begins at the last 0 of its row. Before it stands padding on the left, all of it at position 0 or all
    at 1; anything else are sequences of their own.
    """
    if not isinstance(raw, Tensor) or raw.dim() != 2 or raw.shape[1] != columns or not holds_data(raw):
        return None, False
    positions = on_cpu(raw).expand(rows, -1)
    at = torch.arange(columns)
    start = torch.where(positions == 0, at, 0).amax(1, keepdim=True)
    before = at < start
    first = positions[:, :1]
    if not bool((before & ((positions != first) | (positions > 1))).any()):
        return (~before if bool(before.any()) else None), False
    return None, True


def _past(given: Mapping[str, Any]) -> int | None:
    """The columns that the call's cache holds; None where it says nothing of a cache."""
    cache = next((given[name] for name in CACHES if given.get(name) is not None), None)
    if cache is None:
        return None
    if callable(length := getattr(cache, "get_seq_length", None)):
        return int(length())
    found = next(tensors(cache), None)  # keys [B, H, S, width]
    return None if found is None or found.dim() < 2 else int(found.shape[-2])


# ---- the signature ---------------------------------------------------------------------------------------------


def parameters_of(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of its forward; none where they cannot be told."""
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return {}


def positional(module: nn.Module) -> tuple[str, ...]:
    """The names of its positional arguments, in order."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, each in parameters_of(module).items() if each.kind in kinds)


def sources(model: nn.Module) -> list[nn.Module]:
    """The modules whose calls say which tokens they compute.

    The outermost ones whose forward takes `input_ids`, of an encoder-decoder its encoder and its decoder; the model
    itself where there is none.
    """
    found = list[nn.Module]()
    _collect(model, found, set())
    return found or [model]


def _collect(module: nn.Module, found: list[nn.Module], seen: set[int]) -> None:
    if id(module) in seen:
        return
    seen.add(id(module))
    names = parameters_of(module)
    if IDS in names:
        parts = _encoder_and_decoder(module) if DECODER_IDS in names else []
        found.extend(parts or [module])
        return
    for child in module.children():
        _collect(child, found, seen)


def _encoder_and_decoder(module: nn.Module) -> list[nn.Module]:
    parts = []
    for part in ("encoder", "decoder"):
        getter = getattr(module, f"get_{part}", None)
        each = getter() if callable(getter) else getattr(module, part, None)
        if isinstance(each, nn.Module) and each is not module:
            parts.append(each)
    return parts if len(parts) == 2 else []


# ---- a generation under way ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Session:
    """One run of a `generate` function of the model.

    prompt:  columns of its prompt; None: not known
    eos:     tokens that end a sequence; they and what follows them are padding
    samples: prompts that it was given, each of which may have several sequences (beams); None: not known
    """

    prompt: int | None
    eos: tuple[int, ...]
    samples: int | None


def session(model: nn.Module) -> Session | None:
    """The `generate` of the model that this call is a part of, found on the stack; the same object at each pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _GENERATES and _is_of(frame.f_locals.get("self"), model):
            known = frame.f_locals.get(_SESSION)
            if not isinstance(known, Session):
                known = frame.f_locals[_SESSION] = _begun(frame.f_locals)
            return known
        frame = frame.f_back
    return None


def _is_of(owner: Any, model: nn.Module) -> bool:
    """Whether the function is a method of the model, of a part of it or of what wraps it."""
    if not isinstance(owner, nn.Module):
        return False
    return (
        owner is model
        or any(each is owner for each in model.modules())
        or any(each is model for each in owner.modules())
    )


def _begun(local: Mapping[str, Any]) -> Session:
    ids = local.get(IDS)
    prompt = ids.shape[1] if isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] else None
    config = local.get("generation_config") or getattr(local.get("self"), "generation_config", None)
    eos = getattr(config, "eos_token_id", None)
    if isinstance(eos, Tensor):
        eos = eos.tolist()
    numbers = eos if isinstance(eos, list | tuple) else [eos]
    samples = local.get("batch_size")
    return Session(
        prompt,
        tuple(each for each in numbers if isinstance(each, int)),
        samples if isinstance(samples, int) else None,
    )
