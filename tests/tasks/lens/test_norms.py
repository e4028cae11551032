"""A norm with a fixed scale is linear and, with its bias, the norm itself; what is no norm is refused."""

from __future__ import annotations

import pytest
import torch
from draws import normal
from torch import Tensor, nn

from hookrun.errors import HookrunError
from hookrun.tasks.lens.norms import frozen, rounding, wide

X = normal(4, 8) * 3 + 1


class Gemma(nn.Module):
    """An RMSNorm that multiplies by 1 + weight, with its epsilon under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.variance_epsilon, self.weight = 0.1, nn.Parameter(normal(8))

    def forward(self, x: Tensor) -> Tensor:
        spread = (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        return x * spread * (1 + self.weight)


def drawn(module: nn.Module) -> nn.Module:
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = normal(*parameter.shape, seed=seed)
    return module


NORMS = [nn.LayerNorm(8), nn.LayerNorm(8, eps=0.5), nn.LayerNorm(8, bias=False), nn.RMSNorm(8), Gemma()]
NORMS += [nn.LayerNorm(8, elementwise_affine=False), nn.RMSNorm(8, eps=0.2)]


@torch.no_grad()
@pytest.mark.parametrize("module", NORMS)
def test_a_frozen_norm_is_linear_and_adds_up_to_the_norm(module: nn.Module) -> None:
    found = frozen("ln", drawn(module), X, module(X))
    bias = 0 if found.bias is None else found.bias
    parts = [normal(4, 8, seed=5), normal(4, 8, seed=6)]
    parts.append(X - parts[0] - parts[1])
    torch.testing.assert_close(sum(map(found, parts)) + bias, module(X))
    torch.testing.assert_close(found(2 * parts[0]), 2 * found(parts[0]))
    assert found.scale.shape == (4, 1)


@torch.no_grad()
def test_low_precision_is_computed_in_float32_and_float64_stays() -> None:
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        module = drawn(nn.LayerNorm(8)).to(dtype)
        found = frozen("ln", module, X.to(dtype), module(X.to(dtype)))
        assert found.scale.dtype is wide(X.to(dtype)).dtype is expected
    one, two, half = (
        rounding(dtype, torch.ones(2, 3)) for dtype in (torch.float32, torch.float64, torch.bfloat16)
    )
    assert one.shape == (2, 1) and torch.equal(one, two) and (half > one).all()


@torch.no_grad()
def test_what_computes_something_else_is_refused_and_so_is_what_is_not_finite() -> None:
    for module in (
        nn.Linear(8, 8),
        nn.Identity(),
        nn.Sequential(nn.LayerNorm(8), nn.Tanh()),
        nn.Linear(8, 3),
    ):
        with pytest.raises(HookrunError, match=r"ln \(\w+\) computes neither LayerNorm nor RMSNorm"):
            frozen("ln", module, X, module(X))
    bad = X.clone()
    bad[2, 0] = torch.nan
    with pytest.raises(HookrunError, match=r"ln \(LayerNorm\) returned 8 NaN of 32 elements"):
        frozen("ln", nn.LayerNorm(8), bad, nn.LayerNorm(8)(bad))
