"""The action `replace`."""

from __future__ import annotations

from hookrun.engine.actions.base import Action, Edit, HookSite
from hookrun.engine.actions.values import Value


class Replace(Action):
    """Replace every element by a value (ablation), keeping shape, dtype and device.

    value: a number, or values that broadcast to the tensor's shape

    The new tensor is a constant: no gradient flows back through it, except to a value `{hook: NAME}`.
    """

    action_name = "replace"
    value: Value

    def build(self, site: HookSite) -> Edit:
        """A function x -> a new tensor like x."""
        import torch

        if isinstance(self.value, float):
            number, full_like = self.value, torch.full_like
            return lambda x: full_like(x, number)
        constant, empty_like = site.constant("value"), torch.empty_like
        return lambda x: empty_like(x).copy_(constant(x))
