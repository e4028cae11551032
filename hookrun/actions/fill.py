"""The action `fill`."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from hookrun.actions.base import Action, Edit, HookSite
from hookrun.actions.fields import OneOrMore, OwnName
from hookrun.actions.values import Value, fixed_shape
from hookrun.errors import nearest
from hookrun.hook_types import APPLY, HookType
from hookrun.values.tensors import broadcast_error, broadcasts

if TYPE_CHECKING:
    from torch.nn import Module, Parameter


class Fill(Action):
    """Set parameters of the module, in place, to a value: p = value.

    value:      a number, or values that broadcast to the parameter's shape
    parameters: a name or a list of names; by default all of the module's own, never those of its children
    """

    action_name = "fill"
    hook_types = frozenset({APPLY})
    scope = "module"
    value: Value
    parameters: OneOrMore[OwnName] | None = None

    def incompatibility(self, hook_type: HookType, module: Module, parameters: Collection[str]) -> str | None:
        """The module must have the parameters, and a list of numbers must broadcast to each."""
        if not parameters:
            return "the module has no parameters of its own: select the ones of its children that have"
        for name in self.parameters or ():
            if name not in parameters:
                return f"the module has no parameter {name!r}: {nearest(name, parameters)}"
        for name, parameter in module.named_parameters(recurse=False):
            if self._chosen(name) and (problem := self._misfit(parameter)) is not None:
                return f"parameter {name!r}: {problem}"
        return None

    def _misfit(self, parameter: Parameter) -> str | None:
        from torch.nn.parameter import is_lazy

        if is_lazy(parameter):
            return "it has no shape yet: a lazy module gets it at its first call"
        shape = fixed_shape(self.value)
        if shape is not None and not broadcasts(shape, parameter.shape):
            return broadcast_error(shape, parameter.shape)
        return None

    def build(self, site: HookSite) -> Edit:
        """A function that fills the module's parameters."""
        import torch

        constant = site.constant("value")

        def fill(module: Module) -> None:
            with torch.no_grad():
                for name, parameter in module.named_parameters(recurse=False):
                    if self._chosen(name):
                        parameter.copy_(constant(parameter))

        return fill

    def _chosen(self, name: str) -> bool:
        return self.parameters is None or name in self.parameters
