"""The example functions for `action: python`: they do what their docstrings say, and refuse wrong arguments."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import hookrun
from hookrun import examples

X = torch.tensor([[1.0, -2.0, 300.0], [0.0, 1e-4, -1e30]])


def spec(name: str, hook: str = "forward", **args: object) -> dict[str, dict[str, object]]:
    function = f"hookrun.examples:{name}"
    return {"h": {"select": "0", "hook": hook, "action": "python", "function": function, "args": args}}


def test_soften_limits_smoothly() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        soft = examples.soften(X.clamp(-1e4, 1e4).to(dtype), temperature=0.5)
        assert soft.shape == X.shape
        assert soft.dtype == dtype
        assert soft.abs().max() == 0.5
    assert torch.equal(examples.soften(X), 2 * torch.tanh(X / 2))
    model = nn.Sequential(nn.Identity())
    with hookrun.hooked(model, spec("soften", temperature=3)):
        assert torch.equal(model(X), 3 * torch.tanh(X / 3))


def test_jitter_draws_the_same_in_every_run() -> None:
    model = nn.Sequential(nn.Identity())
    state = torch.get_rng_state()
    found = []
    for _ in range(2):
        with hookrun.hooked(model, spec("jitter", std=0.01)):
            found.append(model(torch.zeros(50, 20)))
    assert torch.equal(*found)
    assert float(found[0].std()) == pytest.approx(0.01, rel=0.1)
    assert torch.equal(torch.get_rng_state(), state)


def test_shrink_multiplies_the_parameters_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with hookrun.hooked(model, spec("shrink", "apply", factor=0.25)):
        model(X)
        model(X)
        for old, new in zip(before, model.parameters(), strict=True):
            assert torch.equal(old * 0.25, new)


@pytest.mark.parametrize("number", [math.nan, math.inf, "2", None, [1]])
def test_other_numbers_than_finite_ones_are_refused(number: object) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    for name, key in (("soften", "temperature"), ("jitter", "std"), ("shrink", "factor")):
        hooks = spec(name, "apply" if name == "shrink" else "forward", **{key: number})
        with pytest.raises(hookrun.CompileError, match=f"{key} is not a finite number"):
            hookrun.compile(hooks, model, example=((X,), {}))
    with pytest.raises(ValueError, match="is not a finite number"):
        examples.soften(X, temperature=10**400)
    with pytest.raises(ValueError, match="expected a number above 0"):
        examples.soften(X, temperature=0)
