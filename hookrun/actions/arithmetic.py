"""Elementwise edits by numbers (scale, add, clamp), which write the result for a part of a tensor into another one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

from hookrun.actions.tensors import nearest_finite, scalars

if TYPE_CHECKING:
    from torch import Tensor, dtype


class Operation(IntEnum):
    """An operation; its number is that of `Operation` in kernels/edits.c."""

    MULTIPLY = 0
    ADD = 1
    CLAMP = 2


class Arithmetic(ABC):
    """A function (x, out) that writes the result for x into out, which may be x.

    operation: what it computes
    """

    operation: ClassVar[Operation]

    @abstractmethod
    def __call__(self, x: Tensor, out: Tensor) -> object:
        """Write the result for x into out, of the same shape and dtype."""

    @abstractmethod
    def numbers(self, kind: dtype) -> tuple[float, float]:
        """Its operands for a tensor of float32 or float64: a factor or a summand and 0, or two bounds."""


class _ByNumber(Arithmetic):
    """An operation with one number, which is rounded to the dtype of the tensor."""

    def __init__(self, number: float) -> None:
        self._number, self._tensors = number, scalars(number)

    def operand(self, kind: dtype) -> Tensor | float:
        """The number in the form in which it is passed to torch, for a tensor of this dtype."""
        return self._tensors.get(kind, self._number)

    def numbers(self, kind: dtype) -> tuple[float, float]:
        """The number as rounded to that dtype, and 0."""
        return self._tensors[kind].item(), 0.0


class MultiplyBy(_ByNumber):
    """x * number."""

    operation = Operation.MULTIPLY

    def __call__(self, x: Tensor, out: Tensor) -> object:
        """Write x * number into out."""
        import torch

        return torch.mul(x, self.operand(x.dtype), out=out)


class AddNumber(_ByNumber):
    """x + number."""

    operation = Operation.ADD

    def __call__(self, x: Tensor, out: Tensor) -> object:
        """Write x + number into out."""
        import torch

        return torch.add(x, self.operand(x.dtype), out=out)


class ClampBetween(Arithmetic):
    """min(max(x, low), high); a bound that a dtype cannot hold counts as the largest finite number that it can."""

    operation = Operation.CLAMP

    def __init__(self, low: float | None, high: float | None) -> None:
        self._low, self._high = low, high
        self._lows, self._highs = in_range(low), in_range(high)

    def __call__(self, x: Tensor, out: Tensor) -> object:
        """Write the clamped x into out."""
        import torch

        low, high = self._lows.get(x.dtype, self._low), self._highs.get(x.dtype, self._high)
        return torch.clamp(x, low, high, out=out)

    def numbers(self, kind: dtype) -> tuple[float, float]:
        """The bounds, infinite where there is none."""
        low, high = self._lows.get(kind, self._low), self._highs.get(kind, self._high)
        return -math.inf if low is None else low, math.inf if high is None else high


def in_range(bound: float | None) -> Mapping[dtype, float]:
    """A finite bound as each dtype can hold it; empty where there is none."""
    return {} if bound is None or math.isinf(bound) else nearest_finite(bound)
