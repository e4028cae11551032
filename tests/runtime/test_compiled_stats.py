"""Records of the compiled statistics equal those computed by torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hookrun
from hookrun.kernels import statistics


def records(**keys: Any) -> list[dict[str, Any]]:
    model = nn.Sequential(nn.Identity())
    spec = {"s": {"select": "0", "hook": "forward", "action": "stats", "of": ["mean", "max"], **keys}}
    with hookrun.hooked(model, spec) as hooks:
        for step in range(2):
            model(torch.arange(4.0) + step)
            model.eval()
            hooks.step()
        assert hooks.fired["s", "0"] == 2
        return hooks.records


def test_records_equal_those_computed_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    short, of_index = records(), records(index="...")
    monkeypatch.setattr(statistics, "_kernel", lambda: None)
    assert short == of_index == records()
    assert [(each["step"], each["mode"], each["mean"]) for each in short] == [
        (0, "train", 1.5),
        (1, "eval", 2.5),
    ]
