"""The action `scale`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from hookrun.actions.arithmetic import MultiplyBy
from hookrun.actions.base import Action, Site
from hookrun.actions.tensors import check_broadcast, scalars
from hookrun.actions.values import Value

if TYPE_CHECKING:
    from torch import Tensor


class Scale(Action):
    """Multiply by a factor: x * factor.

    factor: a number, or values that broadcast to the tensor's shape
    """

    action_name = "scale"
    factor: Value

    @property
    def pointwise(self) -> bool:
        """Whether the factor is a number."""
        return isinstance(self.factor, float)

    def build(self, site: Site) -> Callable[[Any], Any]:
        """A function x -> x * factor."""
        if isinstance(self.factor, float):
            return _by_number(self.factor)
        constant = site.constant("factor")

        def scale(x: Tensor) -> Tensor:
            factor = constant(x)
            check_broadcast(factor, x)
            return x * factor

        return scale

    def build_into(self, site: Site) -> Callable[[Tensor, Tensor], object]:
        """A function (x, out) that writes x * factor into out; the factor is a number."""
        return MultiplyBy(cast(float, self.factor))


def _by_number(factor: float) -> Callable[[Tensor], Tensor]:
    tensors = scalars(factor)
    return lambda x: x * tensors.get(x.dtype, factor)
