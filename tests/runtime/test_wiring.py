"""What is registered on a model is removed again completely."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

import hookrun

EVERY = {
    "pre": {"select": "0", "hook": "forward_pre", "action": "scale", "factor": 2.0},
    "out": {"select": "0", "hook": "forward", "action": "scale", "factor": 2.0},
    "grad": {"select": "0", "hook": "output_grad", "action": "scale", "factor": 2.0},
    "weight": {"select": "0.weight", "hook": "grad", "action": "scale", "factor": 2.0},
    "sum": {"select": "0.weight", "hook": "post_accumulate_grad", "action": "scale", "factor": 2.0},
}


def registered(model: nn.Module) -> list[Any]:
    """All hooks that torch would call."""
    found = list[Any]()
    for module in model.modules():
        found += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        found += [name for name in vars(module) if name == "_compiled_call_impl"]
    for parameter in model.parameters():
        found += [*(parameter._backward_hooks or {}).values()]
        found += [*(getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()]
    return found


def test_hooks_are_registered_until_they_are_removed() -> None:
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)
    plain = model(x)
    with hookrun.hooked(model, EVERY):
        out = model(x)
        out.sum().backward()
        grad = model[0].weight.grad
        assert len(registered(model)) >= len(EVERY) and torch.equal(
            out, 2 * linear(2 * x, *model[0].parameters())
        )
        assert grad is not None and torch.equal(grad, torch.full((2, 2), 2.0 * 2 * 2 * 2 * 2))
    assert not registered(model) and torch.equal(model(x), plain)


def test_an_installation_that_fails_leaves_nothing_registered() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    plan = hookrun.compile(EVERY, model)
    for each in (nn.Sequential(), nn.Sequential(nn.Identity())):
        with pytest.raises(hookrun.CompileError, match="this model has"), plan.install(each):
            pytest.fail("a plan was installed on another model")
        assert not registered(each)
