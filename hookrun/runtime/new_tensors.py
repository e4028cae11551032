"""Modules whose output is always a tensor in new memory, to which nothing else refers when a forward hook runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

_MAKERS: frozenset[type[nn.Module]] = frozenset(
    {
        nn.Linear,
        *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
        *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm),
        *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh),
    }
)
"""torch's classes whose forward is one torch function that allocates its result, unless `inplace` is set."""


def maker(module: nn.Module) -> Callable[..., Any] | None:
    """The forward of such a module; None for any other module."""
    kind = type(module)
    if kind not in _MAKERS or getattr(module, "inplace", False):
        return None
    return kind.forward
