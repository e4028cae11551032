"""Gradients without the factor that mixed precision's gradient scaler puts on the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookrun.containers import members, rebuild
from hookrun.runtime.apply_action import Op
from hookrun.runtime.clock import Clock


def unscaled(op: Op, clock: Clock) -> Op:
    """The op on gradients without the factor that the gradient scaler put on the loss."""
    if clock.scaler is None:
        return op

    def run(value: Any) -> Any:
        scale = clock.loss_scale()
        return op(value) if scale is None else run_unscaled(op, value, scale)

    return run


def run_unscaled(op: Op, value: Any, scale: Tensor) -> Any:
    """The op on a value without its factor, which it has again afterwards.

    It sees 16-bit gradients in 32 bits: unscaled, small ones would be lost, which is what the factor is there to
    prevent.
    """
    plain = rebuild(value, lambda leaf: _unscaled_tensor(leaf, scale) if isinstance(leaf, Tensor) else leaf)
    new = op(plain)
    if new is plain:
        return value
    pairs = zip(members(value), members(plain), strict=True)

    def rescaled(leaf: Any) -> Any:
        old, seen = next(pairs)
        return old if leaf is seen else (leaf * scale).to(old.dtype)

    return rebuild(new, rescaled)


def _unscaled_tensor(tensor: Tensor, scale: Tensor) -> Tensor:
    return (tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor) / scale
