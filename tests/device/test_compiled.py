"""A compiled model with hooks computes on a device what the eager one computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from joint_outcomes import assert_equal
from torch import nn

import hookrun

HOOKS: dict[str, dict[str, Any]] = {
    "scale": {"action": "scale", "factor": 0.5},
    "clamp": {"action": "clamp", "min": -0.1, "max": 0.1},
    "add_bias": {"action": "add_bias", "value": 0.5},
    "part": {"action": "scale", "factor": 2, "index": "..., 0:2"},
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_compiled_model_equals_the_eager_one(name: str, device: torch.device) -> None:
    backend = "aot_eager" if device.type == "second" else "inductor"  # which has no code generator for it
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    x = torch.randn(5, 8).to(device)
    with hookrun.hooked(model, {"h": {"select": "0", "hook": "forward", **HOOKS[name]}}) as hooks:
        expected = model(x).detach()
        compiled = hooks.compile(backend=backend)
        found = compiled(x)
        assert_equal(found.detach().cpu(), expected.cpu())
        found.sum().backward()
        assert hooks.fired["h", "0"] == 2
