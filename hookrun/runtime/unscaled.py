"""Gradients without the factor of mixed precision's gradient scaler."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookrun.containers import members, rebuild
from hookrun.runtime.apply_action import Op
from hookrun.runtime.clock import Clock


def unscaled(op: Op, clock: Clock) -> Op:
    """The op, applied to gradients without the gradient scaler's factor; its result gets the factor again."""
    if clock.scaler is None:
        return op

    def run(value: Any) -> Any:
        scale = clock.loss_scale()
        return op(value) if scale is None else run_unscaled(op, value, scale)

    return run


def run_unscaled(op: Op, value: Any, scale: Tensor) -> Any:
    """Divide the value by the scale, apply the op and multiply the result by the scale again.

    The op gets 16-bit gradients as 32-bit ones: in 16 bits small unscaled gradients would underflow.
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
