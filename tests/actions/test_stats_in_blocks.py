"""Large tensors on the CPU are measured in parts, with the statistics of the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hookrun.actions import stats
from hookrun.actions.stats import measuring

OF_PARTS = ("mean", "std", "var", "sum", "norm", "min", "max", "abs_max")


def measured(x: Tensor, *names: str) -> dict[str, Any]:
    return {name: float(value) for name, value in measuring(names)(x).items()}


def test_the_division_into_parts_does_not_change_the_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (401, 499, 500, 501, 1003)  # the last part has one element, or all of them
    tensors = [torch.randn(size, dtype=torch.float64) * 3 + 50 for size in sizes]
    whole = [measured(x, *OF_PARTS) for x in tensors]
    monkeypatch.setattr(stats, "CPU_BLOCK", 100)
    for x, expected in zip(tensors, whole, strict=True):
        assert measured(x, *OF_PARTS) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("size", [4 * stats.CPU_BLOCK, 3 * 2**20 + 7], ids=["in one", "in parts"])
def test_statistics_of_millions_of_elements_are_accurate(
    by_torch: Callable[[Tensor], dict[str, float]], size: int
) -> None:
    x = torch.full((size,), 100.0)
    x[::2] += 0.5
    expected = by_torch(x)
    found = measured(x, "norm", "std", "mean")
    assert found == pytest.approx({name: expected[name] for name in found}, rel=1e-4)


def test_every_layout_and_dtype_is_supported(by_torch: Callable[[Tensor], dict[str, float]]) -> None:
    x = torch.randn(1100, 1000) * 2 + 3
    for same in (x.t(), x.half(), x.bfloat16(), x.double(), x.clone().requires_grad_()):
        expected = by_torch(same)
        assert measured(same, *OF_PARTS) == pytest.approx(
            {name: expected[name] for name in OF_PARTS}, rel=1e-4
        )
    assert measuring(["std"])(x.double())["std"].dtype == torch.float64


def test_nan_and_infinity_in_one_part_are_found() -> None:
    x = torch.ones(4 * stats.CPU_BLOCK + 100)
    x[-1] = math.inf
    found = measured(x, "max", "norm", "mean", "std", "infs")
    assert [found[name] for name in ("max", "norm", "mean", "infs")] == [math.inf, math.inf, math.inf, 1]
    assert math.isnan(found["std"])
    x[0] = math.nan
    found = measured(x, "min", "max", "norm", "mean", "nans")
    assert all(math.isnan(found[name]) for name in ("min", "max", "norm", "mean")) and found["nans"] == 1


def test_the_tensor_is_not_written() -> None:
    x = torch.randn(4 * stats.CPU_BLOCK + 3)
    before, version = x.clone(), x._version
    measured(x, *OF_PARTS)
    assert torch.equal(x, before) and x._version == version
