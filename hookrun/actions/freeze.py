"""The action `freeze`."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from hookrun.actions.base import Action, Edit, HookSite
from hookrun.actions.fields import OneOrMore, OwnName
from hookrun.errors import nearest
from hookrun.hook_types import APPLY, HookType

if TYPE_CHECKING:
    from torch.nn import Module


class Freeze(Action):
    """Stop the training of every parameter of the module and its descendants: requires_grad = False.

    parameters: a name or a list of names of the module's own parameters, which alone are frozen
    """

    action_name = "freeze"
    hook_types = frozenset({APPLY})
    scope = "module"
    freezes = True
    parameters: OneOrMore[OwnName] | None = None

    def incompatibility(self, hook_type: HookType, module: Module, parameters: Collection[str]) -> str | None:
        """There must be a parameter to freeze, and each must have its shape."""
        from torch.nn.parameter import is_lazy

        if not parameters and next(module.parameters(), None) is None:
            return "neither the module nor a descendant of it has parameters: select modules that have some"
        for name in self.parameters or ():
            if name not in parameters:
                return f"the module has no parameter {name!r}: {nearest(name, parameters)}"
        for name, parameter in module.named_parameters():
            if is_lazy(parameter):
                return (
                    f"parameter {name!r}: it has no shape yet: a lazy module gets it at its first call; "
                    "run one batch through the model first"
                )
        return None

    def build(self, site: HookSite) -> Edit:
        """A function that freezes the module, or these parameters of it."""

        def freeze(module: Module) -> None:
            for name, parameter in module.named_parameters():
                if self.parameters is None or name in self.parameters:
                    parameter.requires_grad_(False)

        return freeze
