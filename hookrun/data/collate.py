"""How samples become a batch: stacked, in lists, by a function of one's own, or one sample as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import is_dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from hookrun.data.given import collate_of_loaders
from hookrun.data.info import DataInfo, TensorInfo
from hookrun.data.samples import Samples
from hookrun.data.settings import LIST, STACK, Data
from hookrun.engine.keys import GIVEN
from hookrun.engine.trust.load import COLLATES, Trusted, load
from hookrun.engine.validation import wrong_call
from hookrun.engine.values.containers import children, describe, get, rebuild, replaced
from hookrun.errors import HookrunError, listed, nearest, reason, refuse, refused_at, spec_error

Collate = Callable[[Sequence[Any]], tuple[Any, Any]]
"""Samples -> inputs and targets of a batch. HookrunError if these samples cannot be one."""

_Join = Callable[[Any], Any]
"""Stacks equal tensors, or makes a list."""

WHERE = "data.collate"
_OTHERS = (
    f"data.collate={LIST}, a function of your own (data.collate={COLLATES.example}) or data.batch_size=null"
)


def collate_of(config: Data) -> Collate:
    """The function that `data.collate` and `data.batch_size` name.

    Raises SpecError for an unknown name, a function that is not trusted or does not take one list of samples, and for
    `data.batch_size=null` with a function: then there is nothing to collate.
    """
    if config.batch_size is None and config.collate != STACK:
        what = f"found {config.collate!r}, and with data.batch_size=null samples are not collated"
        raise spec_error(WHERE, what, "leave it out, or set data.batch_size=1")
    if config.batch_size is None:
        return itemgetter(0)
    if config.collate == STACK:
        return stacked
    if config.collate == GIVEN:
        return collate_of_loaders()
    if config.collate == LIST:
        return partial(_joined, list)
    if ":" not in config.collate:
        what = f"unknown way to make batches '{config.collate}'; {nearest(config.collate, (STACK, LIST))}"
        raise spec_error(WHERE, what, f"use {STACK}, {LIST} or a function of your own, as {COLLATES.example}")
    own = load(config.collate, COLLATES, WHERE)
    refuse(wrong_call(own.target, (), WHERE, own.text, first=1))
    return partial(_own, own)


def _own(own: Trusted, samples: Sequence[Any]) -> tuple[Any, Any]:
    """What the user's function makes of the samples as the data set gives them."""
    try:
        made = own(samples)
    except Exception as error:
        kind = type(samples[0]).__name__
        what = f"{WHERE}: {own.failure(error)}; it gets a list of samples, here of type {kind}"
        raise HookrunError(what) from error
    if isinstance(made, tuple | list) and len(made) == 2:
        return made[0], made[1]
    kind = type(made).__name__
    what = f"{WHERE}: '{own.text}' returned a {kind}, expected (inputs, targets) or (inputs, None)"
    raise HookrunError(what)


def _joined(join: _Join, samples: Sequence[Any]) -> tuple[Any, Any]:
    """The inputs joined, of a dict or a tuple each member; the targets joined, of numbers always to a tensor [B]."""
    try:
        inputs, targets = zip(*samples, strict=True)
        are_numbers = all(isinstance(each, Tensor) and not each.dim() for each in targets)
        join_targets = default_collate if are_numbers else join
        return _in_containers(join, list(inputs)), join_targets(list(targets))
    except (RuntimeError, TypeError, LookupError, ValueError) as error:
        forms = listed(dict.fromkeys(map(describe, samples)), 3)
        what = f"{WHERE}: samples of the form {forms} cannot be joined: {reason(error)}; use {_OTHERS}"
        raise HookrunError(what) from error


def _in_containers(join: _Join, inputs: Sequence[Any]) -> Any:
    if isinstance(inputs[0], dict):
        return {key: join([each[key] for each in inputs]) for key in inputs[0]}
    if type(inputs[0]) is tuple:
        return tuple(map(join, zip(*inputs, strict=True)))
    return join(inputs)


def _stack(values: list[Any]) -> Any:
    """What torch's default_collate makes of them, and of a dataclass its fields stacked."""
    first = values[0]
    if not is_dataclass(first):
        return default_collate(values)
    fields: dict[Any, Any] = {}
    for key, _ in children(first):
        fields[key] = _stack([get(each, (key,)) for each in values])
    return replaced(first, fields)


stacked: Collate = partial(_joined, _stack)
"""Tensors [B, ...] of equal ones."""


# ---- the description of such batches -------------------------------------------------------------------------------


def batched(info: DataInfo, config: Data, collate: Collate) -> DataInfo:
    """The description with batches as they are made; a user's own data shows its form in its first samples.

    Raises SpecError if these cannot be a batch.
    """
    if info.samples is None and not config.unstacked:
        return info
    where = config.unstacked or WHERE
    if info.tokenizer is not None:
        raise spec_error(where, "sequences of tokens are stacked to batches", "leave it out")
    # Batches of one sample are tried with one: a model or a function for these may refuse more.
    most = 1 if config.samples_of_batch == 1 else 3
    collated = partial(_example, info.samples or _zeros(info, most), collate, most)
    with refused_at(where, "correct it", tell=lambda error: str(error).removeprefix(f"{WHERE}: ")):
        targets = [collated(2)[1]]
        if info.inputs and not config.unstacked:
            return info
        targets.append(collated(3)[1])
    return replace(info, target=_part_of_sample(targets, config), collated=collated)


def _example(samples: Samples | list[Any], collate: Collate, most: int, count: int) -> tuple[Any, Any]:
    with torch.random.fork_rng(devices=[]):  # own data and transforms may draw
        return collate([samples[number % len(samples)] for number in range(min(count, most))])


def _zeros(info: DataInfo, count: int) -> list[Any]:
    """Samples of data that declares their form."""
    inputs, targets = info.example_of(count)
    return [(rebuild(inputs, itemgetter(number)), targets[number]) for number in range(count)]


def _part_of_sample(targets: Sequence[Any], config: Data) -> TensorInfo | None:
    """The part of the targets that belongs to a sample; None if they are not one tensor.

    Its first size is -1 if the targets of 2 and 3 samples do not have 2 and 3 rows, as those of graphs with a target
    for each node, or if samples are not batched.
    """
    if not all(isinstance(target, Tensor) and target.numel() for target in targets):
        return None
    first = targets[0]
    if not first.dim():
        return None if config.batch_size else TensorInfo((), first.dtype)
    counts = [1, 1] if config.batch_size == 1 else [2, 3]
    has_rows = config.batch_size and [len(target) for target in targets] == counts
    sizes = tuple(first.shape[1:])
    return TensorInfo(sizes if has_rows else (-1, *sizes), first.dtype)
