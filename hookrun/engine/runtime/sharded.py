"""What fully_shard has divided over the ranks: hooks see whole tensors, each rank keeps its shard.

Putting the whole together is a collective operation: every rank must call these functions at the same places.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookrun.engine.plan.plan import ResolvedPlan
from hookrun.engine.values.private_names import require
from hookrun.errors import HookError, Problem

if TYPE_CHECKING:
    from hookrun.engine.runtime.hooks.base import BoundHook


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor; tested by name, because importing torch.distributed.tensor takes a while."""
    return type(tensor).__name__ == "DTensor"


@torch.no_grad()
def whole(tensor: Any) -> Tensor:
    """The whole tensor, gathered from all ranks; a tensor that is not sharded is returned unchanged."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def own_part(tensor: Any) -> Tensor:
    """This rank's part, detached, on the same memory; a tensor that is not sharded is returned unchanged."""
    return tensor.to_local().detach() if is_sharded(tensor) else tensor


@torch.no_grad()
def like(new: Tensor, there: Any) -> Tensor:
    """A tensor that every rank has whole, sharded like `there`; unchanged if `there` is not sharded."""
    if not is_sharded(there):
        return new
    from torch.distributed.tensor import DTensor, Replicate

    mesh = there.device_mesh
    replicated = DTensor.from_local(new.to(there.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=there.placements)


@torch.no_grad()
def whole_of(part: Tensor, there: Any) -> Tensor:
    """The whole tensor from the parts of all ranks, sharded like `there`; the part itself if `there` is not sharded."""
    if not is_sharded(there):
        return part
    from torch.distributed.tensor import DTensor

    parts: Any = DTensor.from_local(
        part,
        there.device_mesh,
        there.placements,
        run_check=False,
        shape=there.shape,
        stride=there.stride(),
    )
    return whole(parts)


def due(firing: BoundHook) -> bool:
    """Whether step, epoch and mode let it fire now. The answer is the same on every rank, so all gather or none."""
    when, clock = firing.site.spec.keys.when, firing.site.clock
    return when.holds_at(clock.step, clock.epoch) and when.holds_in(clock.model.training)


def edited(value: Tensor, firings: Sequence[BoundHook]) -> Tensor:
    """Apply the firings to a tensor one after the other; returns the same object if nothing changed.

    A sharded tensor is gathered first.
    """
    sharded = is_sharded(value)
    seen = new = whole(value) if sharded else value
    for firing in firings:
        if not sharded or due(firing):
            new = firing.op(new)
    return value if new is seen else like(new, value)


# ---- models -------------------------------------------------------------------------------------------------------


def sharded_modules(model: nn.Module) -> Iterator[Any]:
    """The modules that fully_shard was called on; none if torch.distributed.fsdp was never imported."""
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is None:
        return iter(())
    require("torch, fully_shard")
    return (module for module in model.modules() if isinstance(module, fsdp.FSDPModule))


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether fully_shard was called on the model or a part of it."""
    return any(True for _ in sharded_modules(model))


def reduces(model: nn.Module) -> bool:
    """Whether a backward pass would sum gradients over the ranks now: False after set_requires_gradient_sync(False)."""
    return all(
        group.reduce_grads
        for module in sharded_modules(model)
        for group in module._get_fsdp_state()._fsdp_param_groups
    )


def move_inside_sharding(modules: Iterable[nn.Module], ours: Collection[int]) -> None:
    """Move our forward hooks before fully_shard's own, so that they run while the module has its whole parameters.

    modules: those that have such hooks
    ours:    the ids of the hooks' handles
    """
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is None:
        return
    for module in modules:
        if not isinstance(module, fsdp.FSDPModule):
            continue
        for number in list(reversed(module._forward_hooks)):
            if number in ours:
                module._forward_hooks.move_to_end(number, last=False)


def sharded_too_early(plan: ResolvedPlan, model: nn.Module) -> Iterator[Problem]:
    """A problem for each hook that cannot be installed because the parameters are sharded already."""
    changing = [hook for hook in plan.hooks if hook.spec.hook_type.phase == "installation" or hook.added]
    concerned = changing or any(hook.spec.hook_type.on_parameters for hook in plan.hooks)
    parts = list[str]()
    if concerned:
        parts = [name for name, parameter in model.named_parameters() if is_sharded(parameter)]
    for hook in plan.hooks if parts else ():
        spec = hook.spec
        if hook in changing:
            yield Problem(
                f"{spec.where}.action",
                f"{spec.action.action_name} changes the model's parameters, and {parts[0]} is sharded already",
                "install the hooks before fully_shard",
            )
        elif spec.hook_type.on_parameters and not is_fully_sharded(model):
            yield Problem(
                spec.where,
                f"{parts[0]} is a DTensor not made by fully_shard: it is not known when its gradient is summed",
                "leave the hook out",
            )


@dataclass(eq=False)
class HookedParameter:
    """The parameter `name` of the module `owner`; after fully_shard the shard that has taken its place."""

    owner: nn.Module
    name: str
    parameter: nn.Parameter


@dataclass(eq=False)
class HookedParameters:
    """The hooked parameters by path.

    It checks the parameters before each optimizer step, since hooks on a replaced parameter would be lost silently.
    """

    model: nn.Module
    places: dict[str, HookedParameter] = field(default_factory=dict)

    def add(self, path: str, owner: nn.Module) -> HookedParameter:
        """Add the parameter at this path, which belongs to this module."""
        name = path.rpartition(".")[2]
        return self.places.setdefault(path, HookedParameter(owner, name, owner.get_parameter(name)))

    @property
    def all_there(self) -> bool:
        """Whether every hooked parameter is still the module's parameter of that name."""
        return all(each.owner._parameters.get(each.name) is each.parameter for each in self.places.values())

    def follow(self, *step: object, shards: bool = True) -> None:
        """Move hooks to the shards by which fully_shard has replaced parameters. To be called between two steps.

        step:   what `optimizers.follow` passes; unused
        shards: false: fully_shard was not called

        Raises HookError if a parameter was replaced by anything else.
        """
        for path, place in self.places.items():
            now = place.owner._parameters.get(place.name)
            if now is place.parameter:
                continue
            if shards and now is not None and is_sharded(now) and not is_sharded(place.parameter):
                place.parameter = now
            elif all(other is not place.parameter for other in self.model.parameters()):  # not just renamed
                raise HookError(
                    f"the parameter {path} was replaced after hooks were installed on it, for example by to_empty or "
                    "quantization: its hooks would be lost; install the hooks afterwards"
                )
