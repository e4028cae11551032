"""`optimizer_step_pre` and `optimizer_step_post`, on torch's global step hooks, for the selected parameters only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookrun.hook_types import OPTIMIZER_STEP_POST, OPTIMIZER_STEP_PRE, HookType
from hookrun.runtime.apply_action import run_unscaled
from hookrun.runtime.hooks.base import BoundHook, RegisteredHook, Shared, write
from hookrun.runtime.sharded import Moves, due, is_sharded, shard_of, whole


class OptimizerSteps(RegisteredHook):
    """All optimizer hooks of an installation, in order; they act on the parameters that the optimizer steps.

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
        self.parameters = tuple(moves.get(id(parameter), parameter) for parameter in self.parameters)

    @torch.no_grad()
    def run(self, kind: HookType, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Run the hooks of one kind, before or after a step of these parameters of the optimizer."""
        mine = set(map(id, parameters))
        stepped = [
            (firing, parameter)
            for firing, parameter in zip(self.firings, self.parameters, strict=False)
            if firing.site.hook_type is kind and id(parameter) in mine
        ]
        scale = getattr(optimizer, "grad_scale", None)  # set during the step if the optimizer itself unscales
        unscale = scale if kind.gradient and isinstance(scale, Tensor) else None
        for _, group in groupby(stepped, key=lambda pair: pair[0].site.hook_name):
            pairs = list(group)
            action = pairs[0][0].site.spec.action
            if action.scope == "together":
                groups = defaultdict[str, list[tuple[BoundHook, nn.Parameter]]](list)
                for pair in pairs:
                    groups[action.together_by(pair[0].site.path)].append(pair)
                for together in groups.values():
                    _together(together, unscale)
                continue
            for firing, parameter in pairs:
                value = _value(firing, parameter)
                if value is None or not is_sharded(value) or due(firing):
                    seen = value if value is None else whole(value)
                    new = _run_op(firing, seen, unscale)
                    _write_whole(value, seen, new)


def _value(firing: BoundHook, parameter: nn.Parameter) -> Tensor | None:
    return parameter.grad if firing.site.hook_type.gradient else parameter.data


def _run_op(firing: BoundHook, value: Any, scale: Tensor | None) -> Any:
    return firing.op(value) if scale is None else run_unscaled(firing.op, value, scale)


def _write_whole(value: Tensor | None, seen: Tensor | None, new: Any) -> None:
    """Write an action's result for a whole tensor in place; for a sharded tensor only this rank's shard."""
    if value is not None and new is not seen:
        write(value, shard_of(new, value) if is_sharded(value) else new)


def _together(pairs: list[tuple[BoundHook, nn.Parameter]], scale: Tensor | None) -> None:
    """Run the first site's op on the values of all parameters; the other sites are counted as fired with it."""
    first = pairs[0][0]
    if not due(first):
        return
    values = {firing.site.path: _value(firing, parameter) for firing, parameter in pairs}
    seen = {path: None if value is None else whole(value) for path, value in values.items()}
    before = first.site.fired
    news = _run_op(first, seen, scale)
    for firing, _ in pairs[1:]:
        firing.site.fired += first.site.fired - before
        firing.site.idle += values[firing.site.path] is None
    for path, value in values.items():
        _write_whole(value, seen[path], news[path])
