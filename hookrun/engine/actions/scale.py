"""The action `scale`."""

from __future__ import annotations

from hookrun.engine.actions.base import Action, Edit, HookSite
from hookrun.engine.actions.values import Value


class Scale(Action):
    """Multiply by a factor: x * factor.

    factor: a number, or values that broadcast to the tensor's shape
    """

    action_name = "scale"
    factor: Value

    def build(self, site: HookSite) -> Edit:
        """A function x -> x * factor."""
        factor = site.operand("factor")
        return lambda x: x * factor(x)
