"""Every action on every hook type does the same as on the CPU."""

from __future__ import annotations

import pytest
import torch
from joint_outcomes import assert_equal, trained
from joint_table import Row, rows

import hookrun


@pytest.mark.parametrize("row", list(rows()), ids=lambda row: f"{row.action}-{row.hook}")
def test_a_hook_does_the_same_as_on_the_cpu(row: Row, device: torch.device) -> None:
    found = trained(row.network(), row.spec, device)
    assert sum(found["fired"].values()) > 0
    # noise is drawn on the device, from a generator that gives other numbers than the CPU's
    assert_equal(found, trained(row.network(), row.spec, device if row.action == "noise" else "cpu"))


def test_noise_is_drawn_on_the_device_with_the_asked_deviation(device: torch.device) -> None:
    model = torch.nn.Identity()
    spec = {"h": {"select": "", "hook": "forward", "action": "noise", "std": 0.1}}
    with hookrun.hooked(model, spec):
        drawn = model(torch.zeros(64, 64, device=device))
    assert drawn.device.type == device.type
    assert 0.09 < drawn.std().item() < 0.11
