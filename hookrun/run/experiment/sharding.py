"""`compute.strategy: fsdp`: shards the run's model with torch's fully_shard, and gathers sharded states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookrun.engine.actions.base import Action
from hookrun.engine.plan.model_tree import ModelNames
from hookrun.engine.plan.plan import ResolvedPlan
from hookrun.engine.runtime.sharded import is_sharded, like, sharded_modules, whole
from hookrun.engine.spec.selector import Names
from hookrun.engine.values.containers import rebuild
from hookrun.errors import Problem, listed
from hookrun.run.experiment.settings import Fsdp, Settings

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def units(fsdp: Fsdp, model: nn.Module) -> list[str]:
    """The paths of the modules that `wrap` selects, inner modules first; the model itself is sharded in addition."""
    if fsdp.wrap is None:
        return []
    paths = [path for path in fsdp.wrap.select(ModelNames(model).tree) if path]
    return sorted(paths, key=lambda path: path.count("."), reverse=True)


def shard_problems(settings: Settings, model: nn.Module, plan: ResolvedPlan) -> Iterator[Problem]:
    """Problems of sharding the model with fully_shard as configured."""
    fsdp = settings.compute.fsdp
    where = "compute.fsdp.wrap"
    paths = units(fsdp, model)
    if fsdp.wrap is not None and not paths:
        yield Problem(
            where,
            f"'{fsdp.wrap}' matches no module",
            fsdp.wrap.nearest(Names(list(ModelNames(model).modules))),
        )
    lists = [path for path in paths if isinstance(model.get_submodule(path), nn.ModuleList | nn.ModuleDict)]
    if lists:
        yield Problem(
            where,
            f"{listed(lists)} is a list or dict of modules, which is never called itself",
            f"name its members, such as '{lists[0]}.*'",
        )
    single = [name for name, parameter in model.named_parameters() if not parameter.dim()]
    if single:
        yield Problem(
            "compute.strategy",
            f"fully_shard cannot shard parameters without dimensions: {listed(single)}",
            "use compute=ddp",
        )
    for hook in plan.hooks:
        if hook.spec.action.adds(hook.spec.name) is not None and _adds_a_number(hook.spec.action):
            yield Problem(
                f"{hook.spec.where}.action",
                "fully_shard cannot shard a parameter without dimensions, and the hook adds one",
                "give it one dimension, such as [0.0]",
            )


def _adds_a_number(action: Action) -> bool:
    """Whether the parameter that an action adds has no dimension, as far as its keys say it."""
    if hasattr(action, "shape"):
        return action.shape == ()
    return isinstance(getattr(action, "value", None), float)


def shard(model: nn.Module, fsdp: Fsdp, device: torch.device, size: int) -> None:
    """Shard the model's parameters over all ranks; gradients are summed, not averaged.

    size: the number of ranks
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (size,))
    dtype = DTYPES.get(fsdp.mixed_precision or "")
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    for path in [*units(fsdp, model), ""]:
        fully_shard(
            model.get_submodule(path),
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=fsdp.reshard_after_forward,
        )
    for module in sharded_modules(model):
        module.set_force_sum_reduction_for_comms(True)  # gloo supports only sums
        module.set_gradient_divide_factor(1.0)


def reshard(model: nn.Module) -> None:
    """Shard all parameters again: a forward without a backward pass leaves some of them gathered."""
    for module in sharded_modules(model):
        module.reshard()


def whole_state(model: nn.Module, *, keeps: bool) -> Mapping[str, Tensor]:
    """The model's state dict, gathered from all ranks, on the CPU; every rank calls it.

    keeps: whether this rank needs the result; otherwise its tensors are empty
    """
    parts = model.state_dict(keep_vars=True)  # in which a shared parameter is one object
    gathered: dict[int, Tensor] = {}
    for tensor in parts.values():
        if id(tensor) not in gathered:
            full = whole(tensor.detach()).cpu()
            gathered[id(tensor)] = full if keeps else full.new_empty(0)
    return {name: gathered[id(tensor)] for name, tensor in parts.items()}


def whole_states(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state dict, gathered from all ranks; every rank calls it."""
    return rebuild(optimizer.state_dict(), whole)


def sharded_states(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """A gathered state dict of an optimizer, with the tensors of sharded parameters sharded in the same way."""
    states = dict(state["state"])  # number of a parameter -> its state
    for group, saved_group in zip(optimizer.param_groups, state["param_groups"], strict=False):
        for parameter, number in zip(group["params"], saved_group["params"], strict=False):
            if not is_sharded(parameter) or number not in states:
                continue
            states[number] = dict(states[number])
            for name, value in states[number].items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    states[number][name] = like(value, parameter)
    return {**state, "state": states}
