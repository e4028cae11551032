"""Models that fully_shard has divided over the ranks: the order of hooks, and hooks that must be installed before."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from hookrun.errors import Problem
from hookrun.plan.plan import ResolvedPlan
from hookrun.runtime.sharded import is_sharded


def sharded_modules(model: nn.Module) -> Iterator[Any]:
    """The modules that fully_shard was called on; none if torch.distributed.fsdp was never imported."""
    there = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(there, "FSDPModule", None)
    return (module for module in model.modules() if kind is not None and isinstance(module, kind))


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether fully_shard was called on the model or a part of it."""
    return any(True for _ in sharded_modules(model))


def reduces(model: nn.Module) -> bool:
    """Whether a backward pass would sum gradients over the ranks now: False after set_requires_gradient_sync(False)."""
    return all(group.reduce_grads for module in sharded_modules(model) for group in _groups(module))


def _groups(module: Any) -> Iterator[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # before torch 2.11 there was one group or none
    yield from (each for each in groups or [getattr(state, "_fsdp_param_group", None)] if each is not None)


def move_inside_sharding(model: nn.Module, ours: Collection[int]) -> None:
    """Move our forward hooks before fully_shard's own, so that they run while the module has its whole parameters.

    ours: the ids of the hooks' handles
    """
    for module in sharded_modules(model):
        for number in [each for each in reversed(module._forward_hooks) if each in ours]:
            module._forward_hooks.move_to_end(number, last=False)


def sharded_too_early(plan: ResolvedPlan, model: nn.Module) -> list[Problem]:
    """A problem for each hook that cannot be installed because the parameters are sharded already."""
    parts = [name for name, each in model.named_parameters() if is_sharded(each)]
    problems = list[Problem]()
    for hook in plan.hooks if parts else ():
        spec = hook.spec
        if spec.hook_type.phase == "installation" or spec.action.adds(spec.name) is not None:
            what = (
                f"{spec.action.action_name} changes the model's parameters, and {parts[0]} is sharded already"
            )
            problems.append(Problem(f"{spec.where}.action", what, "install the hooks before fully_shard"))
        elif spec.hook_type.on_parameters and not is_fully_sharded(model):
            what = f"{parts[0]} is a DTensor not made by fully_shard: it is not known when its gradient is summed"
            problems.append(Problem(spec.where, what, "leave the hook out"))
    return problems
