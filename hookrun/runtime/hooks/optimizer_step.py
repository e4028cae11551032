"""`optimizer_step_pre` and `optimizer_step_post`, on torch's global step hooks, for the selected parameters only."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookrun.runtime.hooks.module_hooks import Firing, RegisteredHook, run_unscaled, write


class OptimizerSteps(RegisteredHook):
    """Every optimizer hook of an installation, in order; each firing's parameter beside it."""

    def __init__(self, firings: Iterable[Firing] = (), parameters: Iterable[nn.Parameter] = ()) -> None:
        super().__init__(tuple(firings))
        self.parameters = tuple(parameters)

    def pre(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """torch's global optimizer step pre-hook."""
        self._run("optimizer_step_pre", optimizer)

    def post(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """torch's global optimizer step post-hook."""
        self._run("optimizer_step_post", optimizer)

    @torch.no_grad()
    def _run(self, point: str, optimizer: Optimizer) -> None:
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        stepped = [
            (firing, parameter)
            for firing, parameter in zip(self.firings, self.parameters, strict=False)
            if firing.site.hook_type == point and id(parameter) in mine
        ]
        scale = getattr(optimizer, "grad_scale", None)  # set for the step where the optimizer itself unscales
        unscale = scale if point == "optimizer_step_pre" and isinstance(scale, Tensor) else None
        for _, group in groupby(stepped, key=lambda pair: pair[0].site.hook_name):
            pairs = list(group)
            if pairs[0][0].site.spec.action.scope == "together":
                _together(pairs, point, unscale)
            else:
                for firing, parameter in pairs:
                    _alone(firing, parameter, point, unscale)


def _value(parameter: nn.Parameter, point: str) -> Tensor | None:
    return parameter.grad if point == "optimizer_step_pre" else parameter.data


def _alone(firing: Firing, parameter: nn.Parameter, point: str, scale: Tensor | None) -> None:
    value = _value(parameter, point)
    new = firing.op(value) if scale is None else run_unscaled(firing.op, value, scale)
    if value is not None:
        write(value, new)


def _together(pairs: list[tuple[Firing, nn.Parameter]], point: str, scale: Tensor | None) -> None:
    """The first site's op sees the values of all; the others count as fired with it."""
    first = pairs[0][0]
    values = {firing.site.path: _value(parameter, point) for firing, parameter in pairs}
    before = first.site.fired
    news = first.op(values) if scale is None else run_unscaled(first.op, values, scale)
    for firing, _ in pairs[1:]:
        firing.site.fired += first.site.fired - before
        firing.site.idle += values[firing.site.path] is None
    for path, value in values.items():
        if value is not None:
            write(value, news[path])
