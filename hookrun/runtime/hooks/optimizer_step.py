"""`optimizer_step_pre` and `optimizer_step_post`, on torch's global step hooks, for the selected parameters only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookrun.hook_types import OPTIMIZER_STEP_POST, OPTIMIZER_STEP_PRE, HookType
from hookrun.runtime.apply_action import run_unscaled
from hookrun.runtime.hooked_parameters import Moves, moved
from hookrun.runtime.hooks.base import BoundHook, RegisteredHook, Shared, write
from hookrun.runtime.sharded import due, edited, is_sharded, shard_of, whole


class OptimizerSteps(RegisteredHook):
    """All optimizer hooks of an installation, in order; they act on the parameters that the optimizer has.

    With a closure (``optimizer.step(closure)``: LBFGS, Lightning) `optimizer_step_pre` fires after each call of the
    closure, since that computes the gradients.
    """

    hook_types = (OPTIMIZER_STEP_PRE, OPTIMIZER_STEP_POST)

    def __init__(self, firings: Sequence[BoundHook] = (), shared: Shared | None = None) -> None:
        super().__init__(firings)
        named = dict(shared.model.named_parameters(remove_duplicate=False)) if shared is not None else {}
        self.parameters = tuple(named[firing.site.path] for firing in firings)

    def move(self, moves: Moves) -> None:
        """Replace parameters by the shards that have taken their place."""
        self.parameters = moved(self.parameters, moves)

    def before(self, optimizer: Optimizer) -> None:
        """The optimizer is about to use the gradients."""
        self._run(OPTIMIZER_STEP_PRE, optimizer)

    def after(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped."""
        self._run(OPTIMIZER_STEP_POST, optimizer)

    @torch.no_grad()
    def _run(self, kind: HookType, optimizer: Optimizer) -> None:
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        stepped = [
            (firing, parameter)
            for firing, parameter in zip(self.firings, self.parameters, strict=False)
            if firing.site.hook_type is kind and id(parameter) in mine
        ]
        scale = getattr(optimizer, "grad_scale", None)  # set during the step if the optimizer itself unscales
        unscale = scale if kind.gradient and isinstance(scale, Tensor) else None
        for _, group in groupby(stepped, key=lambda pair: pair[0].site.hook_name):
            pairs = list(group)
            if pairs[0][0].site.spec.action.scope == "together":
                _together(pairs, unscale)
            else:
                for firing, parameter in pairs:
                    _alone(firing, parameter, unscale)


def _value(firing: BoundHook, parameter: nn.Parameter) -> Tensor | None:
    return parameter.grad if firing.site.hook_type.gradient else parameter.data


def _alone(firing: BoundHook, parameter: nn.Parameter, scale: Tensor | None) -> None:
    value = _value(firing, parameter)
    if value is not None and is_sharded(value) and scale is None:
        write(value, edited(value, [firing]))
        return
    seen = value if value is None else whole(value)
    new = firing.op(seen) if scale is None else run_unscaled(firing.op, seen, scale)
    if value is not None:
        _write_whole(value, seen, new)


def _write_whole(value: Tensor, seen: Tensor | None, new: Any) -> None:
    """Write an action's result for a whole tensor in place; for a sharded tensor only this rank's shard."""
    if new is not seen:
        write(value, shard_of(new, value) if is_sharded(value) else new)


def _together(pairs: list[tuple[BoundHook, nn.Parameter]], scale: Tensor | None) -> None:
    """Run the first site's op on the values of all parameters; the other sites are counted as fired with it."""
    first = pairs[0][0]
    if not due(first):
        return
    values = {firing.site.path: _value(firing, parameter) for firing, parameter in pairs}
    seen = {path: None if value is None else whole(value) for path, value in values.items()}
    before = first.site.fired
    news = first.op(seen) if scale is None else run_unscaled(first.op, seen, scale)
    for firing, _ in pairs[1:]:
        firing.site.fired += first.site.fired - before
        firing.site.idle += values[firing.site.path] is None
    for path, value in values.items():
        if value is not None:
            _write_whole(value, seen[path], news[path])
