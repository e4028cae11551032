"""Several hooks at one module run in their order, each on the result of the one before, in every kind of `Forward`."""

from __future__ import annotations

import torch
from torch import nn

import hookrun


def test_edits_follow_each_other_in_order() -> None:
    spec = {
        "double": {"select": "0", "hook": "forward", "action": "scale", "factor": 2.0},
        "limit": {"select": "0", "hook": "forward", "action": "clamp", "max": 3.0},
        "half": {"select": "0", "hook": "forward", "action": "scale", "factor": 0.5},
    }
    model, x = nn.Sequential(nn.ReLU()), torch.linspace(-1, 4, 9)
    before = x.clone()
    with hookrun.hooked(model, spec) as hooks, torch.no_grad():
        out = model(x)
        assert set(hooks.fired.values()) == {1}
    assert torch.allclose(out, (x.relu() * 2).clamp(max=3) * 0.5)
    assert torch.equal(x, before)
