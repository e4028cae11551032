"""How samples become a batch: stacked, in lists, by a function of one's own, or one sample as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from hookrun.config.validation import wrong_call
from hookrun.data.info import DataInfo, TensorInfo
from hookrun.data.samples import NO_TARGET, Sample
from hookrun.errors import HookrunError, counted, nearest, reason, refuse, refused_at, spec_error
from hookrun.spec.experiment import LIST, STACK, Data
from hookrun.trust.load import COLLATES, Trusted, load
from hookrun.values.containers import children, replaced

Batched = tuple[Any, Any]
"""Inputs and targets of a batch."""

Collate = Callable[[Sequence[Any]], Batched]
"""Samples -> inputs and targets of a batch. HookrunError if these samples cannot be one."""

WHERE = "data.collate"
_OTHERS = f"use data.collate={LIST}, a function of your own (data.collate={COLLATES.example}), or data.batch_size=null"


def collate_of(config: Data) -> Collate:
    """The function that `data.collate` and `data.batch_size` name.

    Raises SpecError for an unknown name, a function that is not trusted or does not take one list of samples, and for
    `data.batch_size=null` with a function: then there is nothing to collate.
    """
    if config.batch_size is None:
        if config.collate != STACK:
            raise spec_error(
                WHERE,
                f"found {config.collate!r}, and with data.batch_size=null samples are not collated",
                "leave it out, or set data.batch_size=1",
            )
        return _alone
    if config.collate == STACK:
        return stacked
    if config.collate == LIST:
        return _listed
    if ":" not in config.collate:
        near = nearest(config.collate, (STACK, LIST))
        what = f"unknown way to make batches '{config.collate}'; {near}"
        raise spec_error(WHERE, what, f"use {STACK}, {LIST}, or a function of your own, as {COLLATES.example}")
    own = load(config.collate, COLLATES, WHERE)
    refuse(wrong_call(own.target, (), WHERE, own.text, first=1))
    return OwnCollate(own)


@dataclass(frozen=True)
class OwnCollate:
    """A function of a trusted package, called with a list of samples as the data set gives them."""

    own: Trusted

    def __call__(self, samples: Sequence[Any]) -> Batched:
        """Inputs and targets. HookrunError if the function fails or returns something else."""
        try:
            made = self.own(list(samples))
        except Exception as error:
            raise HookrunError(
                f"{WHERE}: {self.own.failure(error)}; it gets a list of {counted(len(samples), 'sample')} as the data "
                f"set gives them, here of type {type(samples[0]).__name__}, and returns (inputs, targets)"
            ) from error
        if not isinstance(made, tuple | list) or len(made) != 2:
            size = f" of {len(made)}" if isinstance(made, tuple | list) else ""
            raise HookrunError(
                f"{WHERE}: '{self.own.text}' returned a {type(made).__name__}{size}, expected (inputs, targets); "
                "without targets return (inputs, None)"
            )
        inputs, targets = made
        return inputs, NO_TARGET.new_empty(len(samples), 0) if targets is None else targets


def _alone(samples: Sequence[Any]) -> Batched:
    inputs, target = samples[0]
    return inputs, target


def stacked(samples: Sequence[Any]) -> Batched:
    """Tensors [B, ...] in the containers of a sample: dicts, tuples, lists, dataclasses."""
    try:
        inputs, targets = zip(*samples, strict=True)
        return _joined(inputs), _joined(targets)
    except (RuntimeError, TypeError, LookupError, ValueError) as error:
        raise HookrunError(
            f"{WHERE}: {len(samples)} samples cannot be stacked to one batch: {reason(error)}; {_OTHERS}"
        ) from error


def _joined(values: Sequence[Any]) -> Any:
    members = [dict(children(value)) for value in values]
    if not members[0]:
        return default_collate(list(values))
    if any(each.keys() != members[0].keys() for each in members):
        raise ValueError("they have different members")
    return replaced(values[0], {key: _joined([each[key] for each in members]) for key in members[0]})


def _listed(samples: Sequence[Any]) -> Batched:
    """Lists of B in place of stacked tensors: for a dict or tuple of inputs one for each member.

    Targets that are one number each become a tensor [B].
    """
    inputs, targets = map(list, zip(*samples, strict=True))
    batch: Any = inputs
    if isinstance(inputs[0], dict):
        batch = {key: [each[key] for each in inputs] for key in inputs[0]}
    elif type(inputs[0]) is tuple:
        batch = tuple(map(list, zip(*inputs, strict=True)))
    are_numbers = all(isinstance(each, Tensor) and (not each.dim() or each is NO_TARGET) for each in targets)
    return batch, default_collate(targets) if are_numbers else targets


# ---- the description of such batches -------------------------------------------------------------------------------


def batched(info: DataInfo, config: Data, collate: Collate) -> DataInfo:
    """The description with batches as they are made; a user's own data shows its form in its first samples.

    Raises SpecError if these cannot be a batch.
    """
    if config.stacks and info.samples is None:
        return info
    where = WHERE if config.batch_size else "data.batch_size"
    if info.tokenizer is not None:
        what = f"the samples of the data '{info.name}' are sequences of tokens, whose batches are stacked"
        raise spec_error(where, what, "leave it out")
    collated = partial(_example, info, collate, config.samples_of_batch == 1)
    with refused_at(where, "correct it", tell=lambda error: str(error).removeprefix(f"{where}: ")):
        target = _part_of_sample(collated(2), collated(3), config)
    if config.stacks and info.inputs:
        return info
    return replace(info, target=target, collated=collated)


def _example(info: DataInfo, collate: Collate, is_alone: bool, count: int) -> Batched:
    """A batch of the first samples of a user's own data, and of zeros for other data, which declares its form.

    is_alone: batches have one sample, and more might be refused
    """
    own = info.samples
    count = 1 if is_alone else count
    with torch.random.fork_rng(devices=[]):  # own data and transforms may draw
        if own is not None:
            return collate([own[number % len(own)] for number in range(count)])
        return collate([_zeros(info, number) for number in range(count)])


def _zeros(info: DataInfo, number: int) -> Sample:
    target = NO_TARGET if info.target is None else info.target.of_sample(number)
    if isinstance(info.inputs, TensorInfo):
        return info.inputs.of_sample(number), target
    return {name: each.of_sample(number) for name, each in info.inputs.items()}, target


def _part_of_sample(of_two: Batched, of_three: Batched, config: Data) -> TensorInfo | None:
    """The part of the targets that belongs to a sample; None if they are not one tensor.

    Its first size is -1 if batches of 2 and 3 samples do not have 2 and 3 rows, as with graphs that have a target for
    each node; and if samples are not batched and their target has rows of its own.
    """
    first, second = of_two[1], of_three[1]
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or not first.numel():
        return None
    if not first.dim():
        return None if config.batch_size else TensorInfo((), first.dtype)
    counts = (1, 1) if config.samples_of_batch == 1 else (2, 3)
    has_row = config.batch_size is not None and (len(first), len(second)) == counts
    return TensorInfo((*([] if has_row else [-1]), *first.shape[1:]), first.dtype)
