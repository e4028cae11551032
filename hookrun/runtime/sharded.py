"""Tensors that fully_shard has divided over the ranks: hooks see them whole, a rank keeps its shard of the result.

Every rank calls these at the same places, since the whole comes from all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hookrun.runtime.hooks.base import Firing


def is_sharded(tensor: Any) -> bool:
    """Whether ranks hold a part each; without the import of torch.distributed.tensor, which takes a while."""
    return type(tensor).__name__ == "DTensor"


@torch.no_grad()
def whole(tensor: Any) -> Tensor:
    """The tensor with the parts of all ranks; one that is whole is returned as it is."""
    found: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return found


def own_part(tensor: Any) -> Tensor:
    """This rank's part of a tensor without a graph, on the same memory; one that is whole is returned as it is."""
    found: Tensor = tensor.detach().to_local() if is_sharded(tensor) else tensor
    return found


@torch.no_grad()
def shard_of(new: Tensor, like: Any) -> Tensor:
    """This rank's shard of a tensor that every rank has whole, divided as `like` is."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    replicated = DTensor.from_local(new, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=like.placements)


def like(new: Tensor, there: Any) -> Tensor:
    """A tensor that every rank has whole, divided as `there` is; itself where that is whole."""
    return shard_of(new.to(there.device), there) if is_sharded(there) else new


@torch.no_grad()
def whole_of(part: Tensor, there: Any) -> Tensor:
    """The whole of what each rank has a part of, divided as `there` is; the part itself where that is whole."""
    if not is_sharded(there):
        return part
    from torch.distributed.tensor import DTensor

    form = {"shape": there.shape, "stride": there.stride()}
    parts: Any = DTensor.from_local(part, there.device_mesh, there.placements, run_check=False, **form)
    return whole(parts)


def due(firing: Firing) -> bool:
    """Whether step, epoch and mode let it fire now, which is the same on every rank: else nothing is put together."""
    when, clock = firing.site.spec.keys.when, firing.site.clock
    return when.holds_at(clock.step, clock.epoch) and when.holds_in(clock.model.training)


def edited(value: Tensor, firings: Sequence[Firing]) -> Tensor:
    """What the firings make of a tensor, one after the other; the same object where nothing changed.

    A sharded one is put together for them. Edits that treat each element by itself take the shard as it is, but where
    it is counted how many elements they change.
    """
    if not is_sharded(value):
        for firing in firings:
            value = firing.op(value)
        return value
    firings = [firing for firing in firings if due(firing)]
    if all(firing.pointwise is not None and not firing.site.clock.counting for firing in firings):
        return _edited_alone(value, firings)
    seen = new = whole(value)
    for firing in firings:
        new = firing.op(new)
    return value if new is seen else shard_of(new, value)


@torch.no_grad()
def _edited_alone(value: Tensor, firings: Sequence[Firing]) -> Tensor:
    """The same for edits of which each element depends on nothing but itself."""
    from torch.distributed.tensor import DTensor

    whole: Any = value
    seen = new = own_part(value)
    for firing in firings:
        new = firing.op(new)
    if new is seen:
        return value
    sizes, stride = value.shape, value.stride()
    return DTensor.from_local(
        new, whole.device_mesh, whole.placements, run_check=False, shape=sizes, stride=stride
    )
