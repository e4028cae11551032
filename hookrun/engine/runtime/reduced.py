"""Runs hooks on parameter gradients after the gradients have been summed over all ranks.

A tensor hook would see only the rank's own part, and torch never calls one on a sharded parameter. In a user's own loop
DDP or fully_shard sums the gradients: there the hooks run after the backward pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from hookrun.engine.runtime.checkpointing import NO_BACKWARD, graph_task
from hookrun.engine.runtime.hooks.base import ParameterHook
from hookrun.engine.runtime.sharded import (
    HookedParameter,
    HookedParameters,
    is_fully_sharded,
    is_sharded,
    reduces,
)
from hookrun.engine.values.containers import tensors
from hookrun.errors import HookError


@dataclass(eq=False, kw_only=True)
class ReducedGradients:
    """Runs parameter hooks on gradients that are summed over all ranks, equal to those of a single process.

    No hook runs during the backward pass, where a tensor hook would see only the rank's own part.

    needs_dummy_passes: ranks without rows of a batch still run a pass, because collective operations need every rank;
                        see `Clock.is_dummy_pass`
    """

    needs_dummy_passes: bool = False
    _hooks: list[tuple[HookedParameter, ParameterHook]] = field(default_factory=list)

    def add(self, place: HookedParameter, hook: ParameterHook) -> None:
        """Add a hook on the gradient of a parameter."""
        self._hooks.append((place, hook))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The hooked parameters, each once."""
        return list({id(place.parameter): place.parameter for place, _ in self._hooks}.values())

    @property
    def of_each_part(self) -> list[nn.Parameter]:
        """The parameters with hooks that see the gradient of each micro-batch before it is added to the others."""
        return [place.parameter for place, hook in self._hooks if hook.before_accumulation]

    @torch.no_grad()
    def run(
        self,
        before: Iterable[tuple[nn.Parameter, Tensor | None]] = (),
        only: Collection[int] | None = None,
    ) -> None:
        """Run the hooks, when every `parameter.grad` is summed over all ranks: of this micro-batch or the whole step.

        before: parameters with the gradient of earlier micro-batches, which is added after the `grad` hooks have run
        only:   ids of the parameters whose gradient the backward pass has computed; None: all parameters
        """
        waiting = {id(parameter): (parameter, earlier) for parameter, earlier in before}
        hooks_of = defaultdict[int, list[ParameterHook]](list)
        for place, hook in self._hooks:
            if only is None or id(place.parameter) in only:
                hooks_of[id(place.parameter)].append(hook)
        # in the order of a backward pass: last layers first
        for parameter in reversed(self.parameters):
            hooks = hooks_of[id(parameter)]
            for hook in hooks:
                if hook.before_accumulation:
                    hook.reduced(parameter)
            _, earlier = waiting.pop(id(parameter), (parameter, None))
            _accumulate(parameter, earlier)
            for hook in hooks:
                if not hook.before_accumulation:
                    hook.reduced(parameter)
        for parameter, earlier in waiting.values():
            _accumulate(parameter, earlier)


def _accumulate(parameter: nn.Parameter, earlier: Tensor | None) -> None:
    if earlier is None:
        return
    if parameter.grad is not None:
        earlier = earlier + parameter.grad
    parameter.grad = earlier


class GradientsOfWrapped:
    """An installation's hooks on parameter gradients; each forward of the model finds out what sums the gradients.

    added: (module path, name) of the parameters that hooks added, which a wrapper must know
    """

    def __init__(self, model: nn.Module, hooked: HookedParameters, added: Sequence[tuple[str, str]]) -> None:
        self._model = model
        self._hooked = hooked
        self._added = added
        self._whole = model if isinstance(model, DistributedDataParallel) else None
        self._wrapper = self._whole
        self._checked: DistributedDataParallel | None = None
        self._sharded = is_fully_sharded(model)
        self._reduced = ReducedGradients()
        self._reached = set[int]()
        self._before = dict[int, tuple[nn.Parameter, Tensor | None]]()
        self._begun = False

    def add(self, place: HookedParameter, hook: ParameterHook) -> None:
        """Let the registered hook wait for the summed gradient whenever the model is wrapped."""
        self._reduced.add(place, hook)
        hook.waits = partial(self._defer, place.parameter, hook.before_accumulation)

    def clear(self) -> None:
        """Drop all hooks: the object does nothing from now on."""
        self._reduced = ReducedGradients()
        self._wrapper = None

    def forward_begins(self, *call: object) -> None:
        """To be called before each forward. Raises HookError if a hooked parameter was replaced."""
        in_backward = graph_task() != NO_BACKWARD
        if not in_backward:
            # drop the state that a failed backward pass has left; fully_shard cannot go on after one
            self._reached = set()
            self._before = {}
            self._begun = False
        if not self._sharded and not self._hooked.all_there:
            self._sharded = is_fully_sharded(self._model)
            if not self._sharded:
                self._hooked.follow(shards=False)
        wrapper = self._whole or DistributedDataParallel._get_active_ddp_module()
        # A forward without gradients, or a recomputed one, does not start another backward pass.
        if wrapper is not None or (torch.is_grad_enabled() and not in_backward):
            self._wrapper = wrapper
        if self._added and self._wrapper is not None and self._wrapper is not self._checked:
            self._require_added(self._wrapper)
            self._checked = self._wrapper

    def _require_added(self, wrapper: DistributedDataParallel) -> None:
        """Raise HookError if hooks added a parameter after the model was wrapped: its gradient would not be summed."""
        summed = {id(parameter) for parameter in wrapper._module_parameters}
        for owner, name in self._added:
            added = self._model.get_submodule(owner)._parameters.get(name)
            if added is not None and added.requires_grad and id(added) not in summed:
                path = f"{owner}.{name}" if owner else name
                raise HookError(
                    f"hooks added the parameter {path} to a model that DistributedDataParallel had wrapped, which does "
                    "not sum its gradient over the ranks: install the hooks first, then wrap the model"
                )

    # ---- DistributedDataParallel -------------------------------------------------------------------------------

    def _defer(self, parameter: nn.Parameter, before_accumulation: bool) -> bool:
        """Defer the parameter's hooks to the end of the backward pass; False if the gradient is not a rank's part."""
        if self._wrapper is None:
            return False
        if not self._reached:
            Variable._execution_engine.queue_callback(self._backward_ended)
        self._reached.add(id(parameter))
        if before_accumulation:
            earlier = None if parameter.grad is None else parameter.grad.detach().clone()
            self._before[id(parameter)] = (parameter, earlier)
        return True

    def _backward_ended(self) -> None:
        """Queue the hooks behind the wrapper's own callbacks, which put the summed gradients in place."""
        Variable._execution_engine.queue_callback(self._run)

    @torch.no_grad()
    def _run(self) -> None:
        """Run the hooks on summed gradients; `grad` hooks see only what this backward pass has added."""
        if self._begun:
            self._run_sharded()
            return
        reached = self._reached
        before = list(self._before.values())
        self._reached = set()
        self._before = {}
        if self._wrapper is None:
            return
        if not self._wrapper.require_backward_grad_sync:
            if before:
                raise _not_whole("no_sync()", "leave no_sync() out")
            return
        for parameter, earlier in before:
            if earlier is not None and parameter.grad is not None:
                parameter.grad = parameter.grad - earlier
        self._reduced.run(before, reached)

    # ---- fully_shard -------------------------------------------------------------------------------------------

    def forward_ended(self, module: nn.Module, args: Any, output: Any) -> None:
        """To be called after each forward: a gradient of its output begins a backward pass."""
        if self._sharded and torch.is_grad_enabled():
            for tensor in tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._begin)

    def _begin(self, grad: Tensor) -> None:
        """At the beginning of a backward pass: set earlier gradients aside, so that only new ones are there."""
        if self._begun:
            return
        self._begun = True
        Variable._execution_engine.queue_callback(self._backward_ended)
        for parameter in filter(is_sharded, self._reduced.parameters):
            self._before[id(parameter)] = (parameter, parameter.grad)
            parameter.grad = None

    def _run_sharded(self) -> None:
        self._hooked.follow()
        before = list(self._before.values())
        self._before = {}
        self._begun = False
        if reduces(self._model):
            reached = {id(parameter) for parameter in self._reduced.parameters if is_sharded(parameter.grad)}
            self._reduced.run(before, reached)
            return
        for parameter, earlier in before:
            _accumulate(parameter, earlier)
        if self._reduced.of_each_part:
            raise _not_whole("set_requires_gradient_sync(False)", "leave it out")


def _not_whole(under: str, hint: str) -> HookError:
    return HookError(
        f"a `grad` hook acts on the gradient of each micro-batch, which is not summed over the ranks under {under}: "
        f"use post_accumulate_grad or optimizer_step_pre, or {hint}"
    )
