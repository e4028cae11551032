"""Tensors that fully_shard has divided over the ranks: hooks see the whole tensor, each rank keeps its shard.

Putting the whole together is a collective operation: every rank must call these functions at the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hookrun.runtime.hooks.base import Firing


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor; tested by name, because importing torch.distributed.tensor takes a while."""
    return type(tensor).__name__ == "DTensor"


@torch.no_grad()
def whole(tensor: Any) -> Tensor:
    """The whole tensor, gathered from all ranks; a tensor that is not sharded is returned unchanged."""
    found: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return found


def own_part(tensor: Any) -> Tensor:
    """This rank's part, detached, on the same memory; a tensor that is not sharded is returned unchanged."""
    found: Tensor = tensor.detach().to_local() if is_sharded(tensor) else tensor
    return found


@torch.no_grad()
def shard_of(new: Tensor, like: Any) -> Tensor:
    """A tensor that every rank has whole, sharded like `like`."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    replicated = DTensor.from_local(new, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=like.placements)


def like(new: Tensor, there: Any) -> Tensor:
    """A tensor that every rank has whole, sharded like `there`; unchanged if `there` is not sharded."""
    return shard_of(new.to(there.device), there) if is_sharded(there) else new


@torch.no_grad()
def whole_of(part: Tensor, there: Any) -> Tensor:
    """The whole tensor from the parts of all ranks, sharded like `there`; the part itself if `there` is not sharded."""
    if not is_sharded(there):
        return part
    from torch.distributed.tensor import DTensor

    form = {"shape": there.shape, "stride": there.stride()}
    parts: Any = DTensor.from_local(part, there.device_mesh, there.placements, run_check=False, **form)
    return whole(parts)


def due(firing: Firing) -> bool:
    """Whether step, epoch and mode let it fire now. The answer is the same on every rank, so all gather or none."""
    when, clock = firing.site.spec.keys.when, firing.site.clock
    return when.holds_at(clock.step, clock.epoch) and when.holds_in(clock.model.training)


def edited(value: Tensor, firings: Sequence[Firing]) -> Tensor:
    """Apply the firings to a tensor one after the other; returns the same object if nothing changed.

    A sharded tensor is gathered first.
    """
    if not is_sharded(value):
        for firing in firings:
            value = firing.op(value)
        return value
    firings = [firing for firing in firings if due(firing)]
    seen = new = whole(value)
    for firing in firings:
        new = firing.op(new)
    return value if new is seen else shard_of(new, value)
