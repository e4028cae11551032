"""The action `clamp`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from hookrun.actions.base import Action, Site
from hookrun.actions.fields import Number, check_order
from hookrun.actions.tensors import nearest_finite

if TYPE_CHECKING:
    from torch import Tensor, dtype

HALF_MAX = 65504.0  # the largest finite float16; every other dtype that can be clamped reaches further


class Clamp(Action):
    """Limit every element to the range from min to max: min(max(x, min), max); NaN stays NaN.

    min: the lower bound; no bound unless given
    max: the upper bound; no bound unless given

    A bound that the tensor's dtype cannot hold counts as the largest finite number that it can. As in PyTorch, the
    gradient passes where the element was between the bounds and is 0 beyond them.
    """

    action_name = "clamp"
    min: Number | None = None
    max: Number | None = None

    @model_validator(mode="after")
    def _is_a_range(self) -> Clamp:
        if self.min is None and self.max is None:
            raise ValueError("give min, max or both")
        check_order(self.min, self.max)
        return self

    def build(self, site: Site) -> Callable[[Any], Any]:
        """A function x -> clamped x."""
        low, high = _short(self.min), _short(self.max)
        if any(math.isfinite(bound) and abs(bound) > HALF_MAX for bound in (low, high) if bound is not None):
            return _wide(self.min, self.max)
        if high is None:
            return lambda x: x.clamp_min(low)
        if low is None:
            return lambda x: x.clamp_max(high)
        return lambda x: x.clamp(low, high)


def _short(bound: float | None) -> float | None:
    """An int where it says the same: 1.9 against 2.3 µs on small CPU tensors."""
    return int(bound) if bound is not None and bound.is_integer() else bound


def _wide(low: float | None, high: float | None) -> Callable[[Tensor], Tensor]:
    """For bounds outside some dtype's range, which PyTorch refuses."""
    lows, highs = _in_range(low), _in_range(high)
    return lambda x: x.clamp(lows.get(x.dtype, low), highs.get(x.dtype, high))


def _in_range(bound: float | None) -> Mapping[dtype, float]:
    return {} if bound is None or math.isinf(bound) else nearest_finite(bound)
