"""The action `add_bias`."""

from __future__ import annotations

from hookrun.engine.actions.base import Action, Edit, HookSite
from hookrun.engine.actions.fields import Trainable
from hookrun.engine.actions.values import Value


class AddBias(Action):
    """Add a bias: x + value; with `trainable: true` it is a parameter that is trained with the model.

    value:     a number, or values that broadcast to the tensor's shape; the initial value of a trainable bias
    trainable: add a parameter `<hook name>_bias` to the module, on `forward` and `forward_pre` only
    """

    action_name = "add_bias"
    value: Value
    trainable: Trainable = False

    def build(self, site: HookSite) -> Edit:
        """A function x -> x + value."""
        value = site.operand("value")
        return lambda x: x + value(x)
