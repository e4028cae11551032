"""Checks for NaN and infinity: a fast test of all gradients of a step, and a description of one value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hookrun.engine.runtime.sharded import own_part
from hookrun.engine.values.containers import tensors


def all_finite(values: Iterable[Tensor]) -> bool:
    """Whether every element of the floating-point or complex tensors is finite; the host waits once for each device."""
    return not any(wrong.item() for wrong in nonfinite_on(values).values())


def nonfinite_on(values: Iterable[Tensor]) -> dict[torch.device, Tensor]:
    """Device -> a float32 tensor [] on it: 0 if every element of the tensors there is finite, else 1.

    It takes one fused pass over the tensors of each device. It is the test of GradScaler with a scale of 1, which does
    not change the tensors.
    """
    alike = defaultdict[tuple[torch.device, torch.dtype], list[Tensor]](list)
    for value in map(_plain, values):
        alike[value.device, value.dtype].append(value)
    wrong_on = {device: _ONE.new_zeros((), device=device) for device, _ in alike}
    for (device, _), group in alike.items():
        try:
            torch._amp_foreach_non_finite_check_and_unscale_(group, wrong_on[device], _one_on(device))
        # a dtype or layout that the test does not support, such as that of an expanded tensor
        except (RuntimeError, NotImplementedError):
            if any(not_finite(value) for value in group):
                wrong_on[device].fill_(1)
    return wrong_on


_ONE = torch.ones((), dtype=torch.float32, device="cpu")  # explicit: torch's defaults may be others
_one_on = cache(_ONE.to)
"""(device) -> the same number on this device."""


def _plain(value: Tensor) -> Tensor:
    """The values as a dense, real tensor that requires no gradient."""
    if value.requires_grad:
        value = value.detach()
    value = own_part(value)
    if value.layout is not torch.strided:
        value = value.coalesce().values() if value.layout is torch.sparse_coo else value.values()
    return torch.view_as_real(value) if value.is_complex() else value


@torch.no_grad()
def not_finite(value: Any) -> str:
    """A count of the non-finite elements, ``3 NaN and 1 infinite of 640 elements``; empty if all are finite.

    value: a tensor or a container of tensors
    """
    nan = infinite = total = 0
    for tensor in tensors(value):
        if tensor.is_floating_point() or tensor.is_complex():
            numbers = _plain(tensor)
            total += numbers.numel()
            nan += int(numbers.isnan().sum())
            infinite += int(numbers.isinf().sum())
    words = [f"{nan} NaN"] if nan else []
    words += [f"{infinite} infinite"] if infinite else []
    return f"{' and '.join(words)} of {total} elements" if words else ""
