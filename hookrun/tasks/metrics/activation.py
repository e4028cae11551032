"""The loss `activation`: the mean of what a module returns, for inputs or biases that are trained to raise it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hookrun.config.validation import Section, parse
from hookrun.errors import HookrunError, Problem, SpecError, nearest
from hookrun.hook_types import FORWARD
from hookrun.plan.plan import ResolvedPlan
from hookrun.runtime import Installation
from hookrun.runtime.part import Part
from hookrun.runtime.site import HookSite
from hookrun.tasks.run.observers import matches, observer
from hookrun.values.containers import tensors
from hookrun.values.index import AnyIndex


class ActivationKeys(Section):
    """The arguments of the loss.

    module:   the path of the module
    index:    the part of its first tensor, as a hook's `index`; null: all of it
    maximize: whether training raises the mean instead of lowering it
    """

    module: str
    index: AnyIndex | None = None
    maximize: bool = False


class ActivationLoss:
    """The mean of a module's output in the last forward, after the experiment's hooks; its negative to maximize it.

    watching: the installation that reads the output; the loss is computed within it
    """

    def __init__(self, args: Mapping[str, Any], where: str) -> None:
        keys, problems = parse(ActivationKeys, args, where)
        if keys is None:
            raise SpecError(problems)
        self.keys, self._where = keys, where
        self._part = None if keys.index is None else Part(keys.index)
        self._seen: Tensor | None = None

    def problems(self, model: nn.Module) -> list[Problem]:
        """A problem if the model has no such module."""
        paths = [path for path, _ in model.named_modules()]
        if self.keys.module in paths:
            return []
        what = f"the model has no module {self.keys.module!r}"
        return [Problem(f"{self._where}.module", what, nearest(self.keys.module, paths))]

    def watching(self, model: nn.Module) -> Installation:
        """An installation within which the loss sees the module's outputs."""
        module = matches(model, [self.keys.module])
        return Installation(ResolvedPlan("", (observer("activation", FORWARD, module, self._see),)), model)

    def _see(self, site: HookSite, value: Any) -> None:
        self._seen = next(tensors(value), None)

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """The loss of a batch, a tensor without dimensions. HookrunError if the module did not run."""
        seen, self._seen = self._seen, None
        if seen is None or not seen.is_floating_point():
            raise HookrunError(
                f"{self._where}=activation: {self.keys.module} returned no floating-point tensor"
            )
        try:
            mean = (seen if self._part is None else self._part.of(seen)).mean()
        except (IndexError, ValueError) as error:
            raise HookrunError(f"{self._where}.index: {error}") from error
        return -mean if self.keys.maximize else mean
