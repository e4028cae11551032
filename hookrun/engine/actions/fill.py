"""The action `fill`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hookrun.engine.actions.base import HookSite
from hookrun.engine.actions.own_parameters import OnOwnParameters
from hookrun.engine.actions.values import Value, fixed_shape
from hookrun.engine.values.tensors import broadcast_error, broadcasts

if TYPE_CHECKING:
    from torch.nn import Parameter


class Fill(OnOwnParameters):
    """Set parameters of the module, in place, to a value: p = value.

    value:      a number, or values that broadcast to the parameter's shape
    parameters: a name or a list of names; by default all of the module's own, never those of its children
    """

    action_name = "fill"
    value: Value

    def misfit(self, shape: Sequence[int]) -> str | None:
        """A list of numbers must broadcast to the shape."""
        given = fixed_shape(self.value)
        return None if given is None or broadcasts(given, shape) else broadcast_error(given, shape)

    def editor(self, site: HookSite) -> Callable[[str, Parameter], object]:
        """A function that fills a parameter."""
        constant = site.constant("value")
        return lambda name, parameter: parameter.copy_(constant(parameter))
