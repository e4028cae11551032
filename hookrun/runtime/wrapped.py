"""Hooks on gradients of parameters in a loop of the user's own, where DistributedDataParallel sums the gradients.

A tensor hook would see the rank's own part. So under a wrapped model nothing runs while gradients are computed; once
the backward pass is over, and the wrapper has put the reduced gradients in their place, the hooks run on these.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from hookrun.errors import CompileError, HookError, Problem
from hookrun.runtime.hooks.base import ParameterHook, RegisteredHook
from hookrun.runtime.reduced import ReducedGradients


def several_ranks() -> bool:
    """Whether this process is one of several that torch.distributed has joined."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def refuse_sharded(parameter: nn.Parameter, where: str, hook: str) -> None:
    """CompileError for a parameter of which this rank has a part alone."""
    from torch.distributed.tensor import DTensor  # takes a while, and nobody else needs it

    if isinstance(parameter, DTensor):
        what = f"{hook} is sharded over several ranks (fully_shard), and a hook would see this rank's shard alone"
        raise CompileError([Problem(where, what, "use DistributedDataParallel, or leave the hook out")])


class GradientsOfWrapped(RegisteredHook):
    """The hooks on gradients of an installation's parameters; each forward pass of the model tells who reduces them."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self._whole = model if isinstance(model, DistributedDataParallel) else None
        self._wrapper: DistributedDataParallel | None = None
        self._reduced = ReducedGradients()
        self._reached = set[int]()
        self._before = dict[int, tuple[nn.Parameter, Tensor | None]]()
        self._hooked = dict[str, tuple[nn.Module, str, nn.Parameter]]()

    def watch(self, path: str, module: nn.Module, parameter: nn.Parameter) -> None:
        """Notice it if another parameter takes this one's place: hooks on this one would be lost without a word."""
        self._hooked[path] = (module, path.rpartition(".")[2], parameter)

    def add(self, parameter: nn.Parameter, hook: ParameterHook) -> None:
        """The registered hook waits for the reduced gradient from now on, where the model is wrapped."""
        self._reduced.add(parameter, hook)
        hook.waits = partial(self._wait, parameter, hook.before_accumulation)

    def clear(self) -> None:
        """Run nothing from now on."""
        super().clear()
        self._reduced, self._wrapper = ReducedGradients(), None
        self._hooked.clear()

    def forward_pre(self, module: nn.Module, args: Any) -> None:
        """torch's forward pre-hook of the model. HookError where a hooked parameter was replaced."""
        for path, (owner, name, parameter) in self._hooked.items():
            if owner._parameters.get(name) is not parameter:
                raise HookError(
                    f"the parameter {path} was replaced after hooks were installed on it, as fully_shard and to_empty "
                    "do: its hooks would be lost; install them afterwards"
                )
        self._wrapper = self._whole or DistributedDataParallel._get_active_ddp_module()

    def _wait(self, parameter: nn.Parameter, before_accumulation: bool) -> bool:
        """Whether the gradient that is being computed is this rank's part of one."""
        if self._wrapper is None:
            return False
        if not self._reached:
            Variable._execution_engine.queue_callback(self._over)
        self._reached.add(id(parameter))
        if before_accumulation:
            earlier = None if parameter.grad is None else parameter.grad.detach().clone()
            self._before[id(parameter)] = (parameter, earlier)
        return True

    def _over(self) -> None:
        """The backward pass is over; what the wrapper has queued meanwhile, putting the sums in place, comes first."""
        Variable._execution_engine.queue_callback(self._run)

    @torch.no_grad()
    def _run(self) -> None:
        """Every gradient is reduced. `grad` hooks run on what this backward pass has added to it."""
        reached, before = self._reached, list(self._before.values())
        self._reached, self._before = set(), {}
        if self._wrapper is None:
            return
        if not self._wrapper.require_backward_grad_sync:
            if before:
                raise HookError(
                    "a `grad` hook acts on the gradient of each micro-batch, and under no_sync() no rank has it whole: "
                    "use post_accumulate_grad or optimizer_step_pre, or leave no_sync() out"
                )
            return
        for parameter, earlier in before:
            if earlier is not None and parameter.grad is not None:
                parameter.grad = parameter.grad - earlier
        self._reduced.run(before, reached)
