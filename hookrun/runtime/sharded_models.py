"""Models that fully_shard has divided over the ranks: where hooks stand beside its own, and what comes too late."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from hookrun.errors import Problem
from hookrun.plan.plan import ResolvedPlan
from hookrun.runtime.sharded import is_sharded


def sharded_modules(model: nn.Module) -> Iterator[Any]:
    """The modules that fully_shard was called on; there are none where nobody has imported it."""
    there = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(there, "FSDPModule", None)
    return (module for module in model.modules() if kind is not None and isinstance(module, kind))


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether fully_shard was called on the model or a part of it."""
    return any(True for _ in sharded_modules(model))


def reduces(model: nn.Module) -> bool:
    """Whether a backward pass now sums gradients over the ranks: not under set_requires_gradient_sync(False)."""
    return all(group.reduce_grads for module in sharded_modules(model) for group in _groups(module))


def _groups(module: Any) -> Iterator[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # of torch before 2.11 one, or none
    yield from (each for each in groups or [getattr(state, "_fsdp_param_group", None)] if each is not None)


def inside_of_sharding(model: nn.Module, ours: Collection[int]) -> None:
    """Hooks run while the module has its parameters whole: before fully_shard's own hook takes them away again.

    ours: the numbers of the hooks' handles; they come first among the forward hooks of each sharded module
    """
    for module in sharded_modules(model):
        for number in [each for each in reversed(module._forward_hooks) if each in ours]:
            module._forward_hooks.move_to_end(number, last=False)


def too_late(plan: ResolvedPlan, model: nn.Module) -> list[Problem]:
    """The hooks that change the model itself, where its parameters are divided over the ranks already."""
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
            what = f"{parts[0]} is a DTensor that fully_shard has not made: nobody says when its gradient is whole"
            problems.append(Problem(spec.where, what, "leave the hook out"))
    return problems
