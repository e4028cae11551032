"""Axes of charts: map values to positions, and choose ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_LARGEST = 1e280
"""Larger absolute values are drawn at this bound, on a logarithmic axis also values below 1 / bound, so that positions
stay finite."""


@dataclass(frozen=True)
class Axis:
    """Maps values from `low` to `high` to positions from `start` to `end`.

    log:   on a logarithmic scale; both bounds are then positive
    whole: values are whole numbers
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    whole: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, _held(value, self.log)
        if self.log:
            low, high, at = map(math.log10, (low, high, at))
        return round(self.start + (at - low) / (high - low) * (self.end - self.start), 1)

    def ticks(self, about: int = 5) -> list[float]:
        """Round numbers inside the range."""
        if self.log and self.high / self.low >= 30:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            stride = max(1, -(-(last - first) // about))
            return [10.0**power for power in range(first, last + 1, stride)]
        wanted = (self.high - self.low) / about
        power = 10.0 ** math.floor(math.log10(wanted))
        step = next(step * power for step in _STEPS if step * power >= wanted * (1 - 1e-9))
        if self.whole:
            step = 2.0 if step == 2.5 else max(step, 1.0)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def axis_of(
    values: Iterable[float], start: float, end: float, *, log: bool = False, from_zero: bool = False
) -> Axis:
    """An axis that contains every finite value, with a margin; if logarithmic, every positive value."""
    inside = [_held(value, log) for value in values if math.isfinite(value) and (value > 0 or not log)]
    if not inside:
        return Axis(1.0 if log else 0.0, 10.0 if log else 1.0, start, end, log)
    low, high = min(inside), max(inside)
    if log:
        room = max((high / low) ** 0.04 if high / low < math.inf else _LARGEST**0.08, 1.05)
        return Axis(low / room, high * room, start, end, log)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    largest = max(abs(high), abs(low))
    if high - low <= max(1e-12 * largest, 1 / _LARGEST):  # all the same
        half = largest * 0.5 if largest > 1 / _LARGEST else 0.5
        low, high = low - half, high + half
    room = (high - low) * 0.04
    low -= 0 if from_zero and low == 0 else room
    high += 0 if from_zero and high == 0 else room
    return Axis(low, high, start, end)


def _held(value: float, log: bool) -> float:
    """The value, clamped to the bounds that can be drawn."""
    return min(max(value, 1 / _LARGEST if log else -_LARGEST), _LARGEST)


def spans_magnitudes(values: Iterable[float], ratio: float = 50.0) -> bool:
    """Whether all finite values are positive and so far apart that a logarithmic scale shows more."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) / min(finite) >= ratio
