"""The action `freeze`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hookrun.engine.actions.base import HookSite
from hookrun.engine.actions.own_parameters import OnOwnParameters

if TYPE_CHECKING:
    from torch.nn import Parameter


class Freeze(OnOwnParameters):
    """Stop the training of every parameter of the module and its descendants: requires_grad = False.

    parameters: a name or a list of names of the module's own parameters, which alone are frozen
    """

    action_name = "freeze"
    below = True
    does = "freeze"

    def editor(self, site: HookSite) -> Callable[[str, Parameter], object]:
        """A function that freezes a parameter."""
        return lambda name, parameter: parameter.requires_grad_(False)
