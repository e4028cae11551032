"""The action `add_bias`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from hookrun.actions.arithmetic import AddNumber
from hookrun.actions.base import Action, Site
from hookrun.actions.tensors import check_broadcast, scalars
from hookrun.actions.values import Value
from hookrun.hook_types import FORWARD, FORWARD_PRE, HookType

if TYPE_CHECKING:
    from torch import Tensor


class AddBias(Action):
    """Add a bias: x + value; with `trainable: true` it is a parameter that is trained with the model.

    value:     a number, or values that broadcast to the tensor's shape; the initial value of a trainable bias
    trainable: add a parameter `<hook name>_bias` to the module, on `forward` and `forward_pre` only
    """

    action_name = "add_bias"
    value: Value
    trainable: bool = False

    def carried_by(self, hook_type: HookType) -> str | None:
        """Refuse a trainable bias on hook types outside the forward pass."""
        if self.trainable and hook_type not in {FORWARD, FORWARD_PRE}:
            return "`trainable: true` goes with forward and forward_pre only: elsewhere no gradient reaches the bias"
        return None

    def adds(self, hook_name: str) -> str | None:
        """The name of the parameter that holds a trainable bias, or None."""
        return f"{hook_name}_bias" if self.trainable else None

    @property
    def pointwise(self) -> bool:
        """Whether the value is a number and not trained."""
        return isinstance(self.value, float) and not self.trainable

    def build(self, site: Site) -> Callable[[Any], Any]:
        """A function x -> x + value."""
        if self.trainable:
            present = site.trainable("value")
            return _adding(lambda x: present().to(x))  # under autocast x may be of half precision
        if isinstance(self.value, float):
            return _number(self.value)
        return _adding(site.constant("value"))

    def build_into(self, site: Site) -> Callable[[Tensor, Tensor], object]:
        """A function (x, out) that writes x + value into out; the value is a number."""
        return AddNumber(cast(float, self.value))


def _adding(bias_for: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def add(x: Tensor) -> Tensor:
        bias = bias_for(x)
        check_broadcast(bias, x)
        return x + bias

    return add


def _number(value: float) -> Callable[[Tensor], Tensor]:
    tensors = scalars(value)
    return lambda x: x + tensors.get(x.dtype, value)
