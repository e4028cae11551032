"""Example functions for the action `python`, which need no trust: `function: hookrun.examples:soften`.

Each shows one form that such a function may have; its further parameters are the keys of `args`. This is the only
module of hookrun that a file may name, so no function in it reads, writes or imports anything on behalf of an argument.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from hookrun.engine.actions.base import HookContext


def soften(value: Tensor, temperature: float = 2.0) -> Tensor:
    """Limit smoothly: ``temperature * tanh(value / temperature)``, close to `value` if that is small.

    Shape and dtype are those of the value, of any shape. Raises ValueError if `temperature` is not a finite number
    above 0.
    """
    limit = _finite("temperature", temperature)
    if limit <= 0:
        raise ValueError(f"temperature is {limit}, expected a number above 0")
    return limit * torch.tanh(value / limit)


def jitter(value: Tensor, context: HookContext, std: float = 0.1) -> Tensor:
    """Add normal noise of the standard deviation `std`, drawn from the hook's own generator.

    Shape and dtype are those of the value, of any shape. Raises ValueError if `std` is not a finite number.
    """
    noise = torch.randn(
        value.shape, generator=context.generator(value), device=value.device, dtype=value.dtype
    )
    return value + _finite("std", std) * noise


def shrink(module: nn.Module, factor: float = 0.5) -> None:
    """Multiply all parameters of a module by `factor`, once: for `hook: apply`.

    Raises ValueError if `factor` is not a finite number.
    """
    by = _finite("factor", factor)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(by)


def _finite(name: str, number: object) -> float:
    if not isinstance(number, int | float) or not abs(number) <= sys.float_info.max:
        raise ValueError(f"{name} is not a finite number")
    return float(number)
