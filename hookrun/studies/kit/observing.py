"""Hooks of a study's own: they see or replace what modules take and return, after the experiment's hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from hookrun.engine.hook_types import FORWARD, FORWARD_PRE, OUTPUT_GRAD
from hookrun.engine.plan.plan import PlannedHook, ResolvedPlan
from hookrun.engine.runtime import Installation
from hookrun.run.experiment.observers import Exchange, Observe, matches, planned

See = Callable[[str, Any], None]
"""Is called with the path of a module and a value."""

Change = Callable[[str, Tensor], Tensor]
"""The path of a module and a floating-point tensor -> the tensor in its place."""


class Observers:
    """Hooks on modules of a model, which act within `with observers.installation():`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks = list[PlannedHook]()

    def see_inputs(self, paths: Iterable[str], see: See) -> None:
        """Pass what the modules take to `see`."""
        action = Observe(see=lambda site, value: see(site.path, value))
        self._hooks.append(planned("inputs", FORWARD_PRE, matches(self._model, paths), action))

    def see_outputs(self, paths: Iterable[str], see: See) -> None:
        """Pass what the modules return to `see`."""
        action = Observe(see=lambda site, value: see(site.path, value))
        self._hooks.append(planned("outputs", FORWARD, matches(self._model, paths), action))

    def change_outputs(self, paths: Iterable[str], change: Change) -> None:
        """Replace each floating-point tensor that the modules return."""
        action = Exchange(change=lambda site, tensor: change(site.path, tensor))
        self._hooks.append(planned("changed outputs", FORWARD, matches(self._model, paths), action))

    def change_gradients(self, paths: Iterable[str], change: Change) -> None:
        """Replace the gradients with respect to what the modules return."""
        action = Exchange(change=lambda site, tensor: change(site.path, tensor))
        self._hooks.append(planned("changed gradients", OUTPUT_GRAD, matches(self._model, paths), action))

    def installation(self) -> Installation:
        """The hooks so far, to be entered."""
        return Installation(ResolvedPlan(type(self._model).__name__, tuple(self._hooks)), self._model)


def paths_of(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    """The paths of the modules of a class."""
    return [path for path, module in model.named_modules() if isinstance(module, kind)]
