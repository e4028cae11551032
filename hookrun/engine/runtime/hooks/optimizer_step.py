"""`optimizer_step_pre` and `optimizer_step_post`, on torch's global step hooks, for the selected parameters only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookrun.engine.hook_types import OPTIMIZER_STEP_POST, OPTIMIZER_STEP_PRE, HookType
from hookrun.engine.runtime.apply_action import run_unscaled
from hookrun.engine.runtime.hooks.base import BoundHook, RegisteredHook, write
from hookrun.engine.runtime.sharded import HookedParameter, due, like, whole


class OptimizerSteps(RegisteredHook):
    """All optimizer hooks of an installation, in order; they act on the parameters that the optimizer steps.

    With a closure (``optimizer.step(closure)``: LBFGS, Lightning) `optimizer_step_pre` fires after each call of the
    closure, since that computes the gradients.
    """

    hook_types = (OPTIMIZER_STEP_PRE, OPTIMIZER_STEP_POST)

    places: Sequence[HookedParameter] = ()
    """For each firing its parameter."""

    @torch.no_grad()
    def run(self, kind: HookType, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Run the hooks of one kind, before or after a step of these parameters of the optimizer."""
        stepped = set(map(id, parameters))
        if kind is OPTIMIZER_STEP_PRE:
            self._copy_parameters(stepped)
        scale = getattr(optimizer, "grad_scale", None)  # set during the step if the optimizer itself unscales
        unscale = scale if kind.gradient and isinstance(scale, Tensor) else None
        groups = defaultdict[tuple[str, str], list[tuple[BoundHook, nn.Parameter]]](list)
        for firing, place in zip(self.firings, self.places, strict=False):
            site = firing.site
            if site.hook_type is kind and id(place.parameter) in stepped:
                action = site.spec.action
                group = site.path
                if action.scope == "together":
                    group = action.together_by(site.path)
                groups[site.hook_name, group].append((firing, place.parameter))
        for pairs in groups.values():
            _run(pairs, unscale)

    def _copy_parameters(self, stepped: Collection[int]) -> None:
        """For hooks after the step that compare with the parameter before it. stepped: the ids of the parameters

        With a closure, which may be called several times in a step, the first copy counts.
        """
        for firing, place in zip(self.firings, self.places, strict=False):
            site = firing.site
            if site.reads_before and id(place.parameter) in stepped and due(firing):
                step = site.clock.step
                if site.before is None or site.before_at != step:
                    site.before = whole(place.parameter.data).clone()
                    site.before_at = step


def _run(pairs: list[tuple[BoundHook, nn.Parameter]], scale: Tensor | None) -> None:
    """Run the first site's op on the value, or on those of all parameters; the other sites are counted with it.

    Results are written in place; for a sharded tensor only this rank's shard.
    """
    first = pairs[0][0]
    if not due(first):
        return
    site = first.site
    op = first.op
    values: dict[str, Tensor | None] = {}
    for firing, parameter in pairs:
        values[firing.site.path] = parameter.grad if site.hook_type.gradient else parameter.data
    seen = {path: whole(value) for path, value in values.items()}
    together = site.spec.action.scope == "together"
    value: Any = seen if together else seen[site.path]
    before = site.fired
    new = op(value) if scale is None else run_unscaled(op, value, scale)
    for firing, _ in pairs[1:]:
        firing.site.fired += site.fired - before
        firing.site.idle += values[firing.site.path] is None
    for firing, _ in pairs:
        firing.site.before = None
    for path, tensor in values.items():
        result = new[path] if together else new
        if tensor is not None and result is not seen[path]:
            write(tensor, like(result, tensor))
