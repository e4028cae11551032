"""The statistics of a tensor, computed by torch in float64."""

from __future__ import annotations

from typing import Any


def statistics_by_torch(x: Any) -> dict[str, float]:
    """Every statistic of a tensor."""
    x = x.detach().double()
    found = {name: getattr(x, name)().item() for name in ("mean", "std", "var", "min", "max", "norm", "sum")}
    of_absolute = {"abs_mean": x.abs().mean().item(), "abs_max": x.abs().max().item()}
    counts = {"nans": x.isnan().sum().item(), "infs": x.isinf().sum().item()}
    return {**found, **of_absolute, **counts, "zeros": (x == 0).double().mean().item()}
