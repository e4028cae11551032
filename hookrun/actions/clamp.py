"""The action `clamp`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, model_validator

from hookrun.actions.base import Action, Edit, HookSite
from hookrun.actions.fields import check_order
from hookrun.actions.values import Value, numbers

if TYPE_CHECKING:
    from torch import Tensor


def _not_nan(bound: Any) -> Any:
    if any(map(math.isnan, numbers(bound))):
        raise ValueError("found nan, which is neither above nor below any number")
    return bound


Bound = Annotated[Value, AfterValidator(_not_nan)]
"""A number, or values that broadcast to the tensor's shape; an infinite value means no bound."""

HALF_MAX = 65504  # the largest finite float16; every other dtype that can be clamped reaches further


class Clamp(Action):
    """Limit every element to the range from min to max: min(max(x, min), max); NaN stays NaN.

    min: lower bound, a number or values that broadcast to the tensor's shape; by default none
    max: upper bound, likewise

    A bound beyond the range of the tensor's dtype counts as the largest finite number of that dtype. As in PyTorch, the
    gradient passes through elements between the bounds and is 0 for the others.
    """

    action_name = "clamp"
    min: Bound | None = None
    max: Bound | None = None

    @model_validator(mode="after")
    def _is_a_range(self) -> Clamp:
        if self.min is None and self.max is None:
            raise ValueError("give min, max or both")
        check_order(self.min, self.max)
        return self

    def build(self, site: HookSite) -> Edit:
        """A function x -> clamped x."""
        if all(_fits_every_dtype(bound) for bound in (self.min, self.max)):
            low, high = map(_whole_as_int, (self.min, self.max))
            if high is None:
                return lambda x: x.clamp_min(low)
            return (lambda x: x.clamp_max(high)) if low is None else lambda x: x.clamp(low, high)
        lows, highs = self._bound("min", site), self._bound("max", site)
        return lambda x: x.clamp(lows(x), highs(x))

    def _bound(self, field: str, site: HookSite) -> Callable[[Tensor], Tensor | None]:
        bound = getattr(self, field)
        if bound is None:
            return lambda x: None
        constant = site.constant(field)
        if max((abs(number) for number in numbers(bound) if math.isfinite(number)), default=0) <= HALF_MAX:
            return constant
        import torch

        endless = torch.tensor(bound, device="cpu", dtype=torch.float64).isinf()

        def within_dtype(x: Tensor) -> Tensor:
            value, top = constant(x), torch.finfo(x.dtype).max
            return torch.where(endless.to(x.device), value, value.clamp(-top, top))

        return within_dtype


def _fits_every_dtype(bound: Any) -> bool:
    """Whether it is None or a number that torch takes as a bound for tensors of every dtype."""
    return bound is None or (isinstance(bound, float) and (abs(bound) <= HALF_MAX or math.isinf(bound)))


def _whole_as_int(bound: Any) -> Any:
    """A whole number as an int: 1.9 instead of 2.3 µs on small CPU tensors."""
    return int(bound) if bound is not None and bound.is_integer() else bound
