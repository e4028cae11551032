"""`noise`: random numbers of the site's own generator."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fake_site import build
from pydantic import ValidationError

from hookrun.engine.actions.noise import Noise

KINDS = ("gaussian", "uniform", "multiplicative")
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_the_noise_has_the_standard_deviation_std(kind: str, dtype: torch.dtype) -> None:
    x = torch.full((40_000,), 2.0, dtype=dtype)
    noise = build(Noise(std=0.25, kind=kind))(x) - x
    std = 0.25 * (2 if kind == "multiplicative" else 1)
    assert noise.mean().abs().item() < 5 * std / math.sqrt(x.numel())
    assert noise.std().item() == pytest.approx(std, rel=0.02)


def test_uniform_noise_stays_within_its_bounds() -> None:
    largest = build(Noise(std=0.5, kind="uniform"))(torch.zeros(10_000)).abs().max()
    assert 0.99 < largest / (0.5 * math.sqrt(3)) <= 1


@each_kind
def test_a_std_of_0_adds_no_noise(kind: str) -> None:
    x = torch.randn(3, 4)
    assert torch.equal(build(Noise(std=0, kind=kind))(x), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_small_multiplicative_noise_survives_half_precision(dtype: torch.dtype) -> None:
    x = torch.rand(40_000).add(0.5).to(dtype)  # a zero would have no ratio
    noise = build(Noise(std=0.002, kind="multiplicative"))(x).float() / x.float() - 1
    # The remaining difference is the rounding of the result; a factor rounded first would be 1 nearly everywhere.
    assert noise.count_nonzero() > 0.1 * x.numel()
    assert noise.mean().abs() < 1e-4


@pytest.mark.parametrize("kind", ["gaussian", "uniform"])
def test_the_gradient_passes_additive_noise_unchanged(kind: str) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    build(Noise(kind=kind))(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 4))


def test_the_gradient_of_multiplicative_noise_is_its_factor() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    noisy = build(Noise(kind="multiplicative"))(x)
    noisy.sum().backward()
    torch.testing.assert_close(x.grad, (noisy / x).detach())


@pytest.mark.parametrize(
    "keys", [{"std": -0.1}, {"std": math.inf}, {"std": "0.1"}, {"seed": -1}, {"seed": 1.5}, {"seed": True}]
)
def test_std_may_not_be_negative(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(keys))):
        Noise(**keys)
