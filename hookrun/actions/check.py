"""The action `check`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from hookrun.actions.base import Action, Site
from hookrun.actions.fields import Number, check_order

if TYPE_CHECKING:
    from torch import Tensor


class Check(Action):
    """Require that every element is finite and within min <= x <= max, and say where it is not.

    finite: refuse NaN and infinities
    min:    the least value allowed
    max:    the largest value allowed
    policy: `error` fails at the module; `stop` finishes the step, saves and ends the run; `warn` only records

    NaN is within no bounds: it fails `min` and `max` also where `finite` is false. Complex tensors count by their
    absolute value. An empty tensor passes.
    """

    name = "check"
    observes = True
    finite: bool = Field(default=True, strict=True)
    min: Number | None = None
    max: Number | None = None
    policy: Literal["error", "stop", "warn"] = "error"

    @model_validator(mode="after")
    def _requires_something(self) -> Check:
        if not self.finite and self.min is None and self.max is None:
            raise ValueError("nothing is left to check: give min, max or `finite: true`")
        check_order(self.min, self.max)
        return self

    def build(self, site: Site) -> Callable[[Any], Any]:
        """Judge every tensor that comes by from its two extremes: one pass, and NaN is both of them."""
        low = -math.inf if self.min is None else self.min
        high = math.inf if self.max is None else self.max
        above = _compare("gt" if self.finite and math.isinf(low) else "ge", low)
        below = _compare("lt" if self.finite and math.isinf(high) else "le", high)
        message, policy, judge = self.requirement(), self.policy, site.judge

        def check(x: Tensor) -> None:
            if x.numel():
                x = x.detach()
                least, largest = (x.abs() if x.is_complex() else x).aminmax()
                judge(above(least) & below(largest), message, policy)

        return check

    def requirement(self) -> str:
        """For messages: ``expected every element to be finite, at least 0 and at most 1``."""
        words = ["finite"] if self.finite else []
        if self.min is not None:
            words.append(f"at least {self.min:.12g}")
        if self.max is not None:
            words.append(f"at most {self.max:.12g}")
        return "expected every element to be " + ", ".join(words[:-1]) + " and " * (len(words) > 1) + words[-1]


def _compare(operator: str, bound: float) -> Callable[[Tensor], Tensor]:
    if operator == "gt":
        return lambda x: x > bound
    if operator == "lt":
        return lambda x: x < bound
    return (lambda x: x >= bound) if operator == "ge" else (lambda x: x <= bound)
