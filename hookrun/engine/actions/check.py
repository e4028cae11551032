"""The action `check`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from hookrun.engine.actions.base import Action, Edit, HookSite
from hookrun.engine.actions.fields import Number, Policy, check_order
from hookrun.engine.values.tensors import elements, nearest_finite, widened
from hookrun.errors import listed

if TYPE_CHECKING:
    from torch import Tensor, dtype

_SHOWN = 4
"""How many samples a message names."""


class Check(Action):
    """Check that every element is finite and min <= x <= max, and report the module where it is not.

    finite: refuse NaN and infinities
    min:    the smallest allowed value
    max:    the largest allowed value
    policy: `error` raises at the module; `stop` finishes the step, saves and ends the run; `warn` only records

    NaN fails `min` and `max` even if `finite` is false. Of complex tensors the absolute value is checked. float8
    is compared in float32. An empty tensor passes.
    """

    action_name = "check"
    observes = True
    finite: bool = Field(default=True, strict=True)
    min: Number | None = None
    max: Number | None = None
    policy: Policy = "error"

    @model_validator(mode="after")
    def _requires_something(self) -> Check:
        if not self.finite and self.min is None and self.max is None:
            raise ValueError("nothing is left to check: give min, max or `finite: true`")
        check_order(self.min, self.max)
        return self

    def build(self, site: HookSite) -> Edit:
        """A function that checks each tensor by its minimum and maximum: one pass, and a NaN makes both NaN."""
        import torch

        low = self._bounds(self.min, -math.inf)
        high = self._bounds(self.max, math.inf)
        message = self.requirement()
        policy = self.policy
        report = site.check_result

        def check(x: Tensor) -> None:
            x = elements(x.detach())
            if x.numel():
                if x.is_complex():
                    x = x.abs()
                least, largest = widened(x).aminmax()
                dtype = x.dtype if x.dtype in low else torch.float32
                report((least >= low[dtype]) & (largest <= high[dtype]), message, policy, least, largest)

        return check

    def _bounds(self, bound: float | None, none: float) -> dict[dtype, Tensor]:
        """dtype -> the bound as a tensor [], since comparing with a Python float takes three times as long.

        A bound beyond the range of a dtype would become infinite there, so that an infinity would pass the check.
        """
        import torch

        wanted = none if bound is None else bound
        numbers = nearest_finite(wanted)
        if not self.finite and math.isinf(wanted):
            numbers = dict.fromkeys(numbers, wanted)
        return {
            dtype: widened(torch.tensor(number, dtype=dtype, device="cpu"))
            for dtype, number in numbers.items()
        }

    def requirement(self) -> str:
        """For messages: ``expected every element to be finite, at least 0 and at most 1``."""
        words = ["finite"] if self.finite else []
        if self.min is not None:
            words.append(f"at least {self.min:.12g}")
        if self.max is not None:
            words.append(f"at most {self.max:.12g}")
        text = words[-1] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
        return f"expected every element to be {text}"


@dataclass
class LastPassed:
    """The tensors that passed each check in the current pass through the model, from the records of checks.

    A new pass begins with a new step, or when the same tensor is checked again.
    """

    _passed: dict[str, dict[tuple[Any, ...], None]] = field(default_factory=dict)

    def before(self, record: Mapping[str, Any]) -> str | None:
        """Path and class of the module where the check passed last before this one; None: nowhere in this pass.

        A record of a check that passed is noted.
        """
        when = record["mode"], record["epoch"], record["step"]
        module = f"{record['module'] or '(root)'} ({record.get('class', '')})"
        checked = (module, record["path"], record["call"], when)
        since = self._passed.setdefault(record["hook"], {})
        if since and (checked in since or next(iter(since))[-1] != when):
            since.clear()
        before = next(reversed(since))[0] if since else None
        if record["ok"]:
            since[checked] = None
        return before


def verdict(record: Mapping[str, Any]) -> str:
    """What a check required, what it found, and the last place at which it passed, if there is one.

    ``expected every element to be finite, found nan; last good: layer2 (Sequential)``
    """
    least = float(record["least"])
    largest = float(record["largest"])
    text = f"{record['message']}, found {least:.6g}"
    if least != largest and not math.isnan(least):
        text += f" to {largest:.6g}"
    if record.get("samples"):
        text += f" among the samples {listed(map(str, record['samples']), _SHOWN)}"
    if record.get("last_good"):
        text += f"; last good: {record['last_good']}"
    return text
