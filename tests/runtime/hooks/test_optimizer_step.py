"""Hooks before a step act on the gradients, hooks after it on the parameters, of that optimizer only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookrun


@pytest.mark.filterwarnings("ignore::hookrun.HookrunWarning")  # one of the optimizers does not step
def test_the_gradient_is_edited_before_and_the_parameter_after_its_optimizer_s_step() -> None:
    model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
    spec = {
        "before": {"select": "*.weight", "hook": "optimizer_step_pre", "action": "scale", "factor": 10.0},
        "after": {"select": "*.weight", "hook": "optimizer_step_post", "action": "clamp", "max": -4.0},
    }
    for parameter in model.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.full_like(parameter, 0.5)
    with hookrun.hooked(model, spec) as hooks:
        torch.optim.SGD(model[0].parameters(), lr=1.0).step()
        fired = [hooks.fired[hook, f"{each}.weight"] for hook in spec for each in (0, 1)]
    assert [each.weight.item() for each in model] == [-4.0, 1.0]
    assert fired == [1, 0, 1, 0]
