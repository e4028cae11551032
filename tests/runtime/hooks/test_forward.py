"""Several hooks at one module run in their order, each on the result of the one before, in every kind of `Forward`."""

from __future__ import annotations

import torch
from torch import nn

import hookrun
from hookrun.runtime.in_parts import SMALLEST


def test_edits_follow_each_other_in_order_for_small_and_large_outputs() -> None:
    spec = {
        "double": {"select": "0", "hook": "forward", "action": "scale", "factor": 2.0},
        "limit": {"select": "0", "hook": "forward", "action": "clamp", "max": 3.0},
        "half": {"select": "0", "hook": "forward", "action": "scale", "factor": 0.5},
    }
    for size in (4, SMALLEST):
        model, x = nn.Sequential(nn.ReLU()), torch.linspace(-1, 4, size)
        before = x.clone()
        with hookrun.hooked(model, spec) as hooks, torch.no_grad():
            out = model(x)
            assert set(hooks.fired.values()) == {1}, size
        assert torch.allclose(out, (x.relu() * 2).clamp(max=3) * 0.5), size
        assert torch.equal(x, before), size
