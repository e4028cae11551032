"""Hooks stop the host no more often than they must."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookrun

second_device = pytest.importorskip("second_device")


def test_a_clamp_does_not_wait(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(device)
    x = torch.randn(2, 4).to(device)
    hooks = {"clip": {"select": "0", "hook": "forward", "action": "clamp", "min": -0.1, "max": 0.1}}
    with hookrun.hooked(model, hooks):
        model(x)
        with second_device.watch() as seen:
            out = model(x)
    assert not seen, seen
    assert out.max().item() == torch.tensor(0.1).item()
