"""The base class of actions that change parameters of a module in place, at installation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from hookrun.engine.actions.base import Action, Edit, HookSite
from hookrun.engine.actions.fields import OneOrMore, OwnName
from hookrun.engine.hook_types import APPLY, HookType
from hookrun.errors import nearest

if TYPE_CHECKING:
    from torch.nn import Module, Parameter

LAZY = "it has no shape yet: a lazy module gets it at its first call; run one batch through the model first"


class OnOwnParameters(Action):
    """An action on the module's own parameters, or on those that `parameters` names.

    below: without names also on those of its descendants
    """

    below: ClassVar[bool] = False
    hook_types = frozenset({APPLY})
    scope = "module"
    parameters: OneOrMore[OwnName] | None = None

    def misfit(self, shape: Sequence[int]) -> str | None:
        """Why the action cannot change a parameter of that shape, or None."""
        return None

    @abstractmethod
    def editor(self, site: HookSite) -> Callable[[str, Parameter], object]:
        """A function of a parameter's name and the parameter, which changes the parameter in place."""

    def takes(self, parameter: Parameter) -> bool:
        """Whether the action changes a parameter that no name asks for."""
        return True

    def incompatibility(self, hook_type: HookType, module: Module, parameters: Collection[str]) -> str | None:
        """The module must have the parameters, and they must fit."""
        from torch.nn.parameter import is_lazy

        if self.below and not parameters and next(module.parameters(), None) is None:
            return "neither the module nor a descendant of it has parameters: select modules that have some"
        if not self.below and not parameters:
            return "the module has no parameters of its own: select the ones of its children that have"
        for name in self.parameters or ():
            if name not in parameters:
                return f"the module has no parameter {name!r}: {nearest(name, parameters)}"
        for name, parameter in module.named_parameters(recurse=self.below):
            if (self.parameters is None or name in self.parameters) and is_lazy(parameter):
                return f"parameter {name!r}: {LAZY}"
        chosen = list(self._chosen(module))
        added_later = any(not hasattr(module, name) for name in parameters)
        if not chosen and not added_later:
            return f"none of the module's own parameters fits: {', '.join(parameters)}; select other modules"
        for name, parameter in chosen:
            if (problem := self.misfit(parameter.shape)) is not None:
                return f"parameter {name!r}: {problem}"
        return None

    def build(self, site: HookSite) -> Edit:
        """A function that changes the module's parameters."""
        import torch

        edit = self.editor(site)

        def change(module: Module) -> None:
            with torch.no_grad():
                for name, parameter in self._chosen(module):
                    edit(name, parameter)

        return change

    def _chosen(self, module: Module) -> Iterator[tuple[str, Parameter]]:
        for name, parameter in module.named_parameters(recurse=self.below):
            if self.takes(parameter) if self.parameters is None else name in self.parameters:
                yield name, parameter
