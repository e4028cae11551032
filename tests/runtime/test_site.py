"""A site provides what an action declares, and refuses what it does not."""

from __future__ import annotations

import torch
from torch import nn

import hookrun


def test_a_hook_at_two_modules_draws_different_numbers_that_repeat_in_each_run() -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    spec = {"n": {"select": "*", "hook": "forward", "action": "noise", "std": 1.0}}
    runs = list[torch.Tensor]()
    for _ in range(2):
        with hookrun.hooked(model, spec):
            first = model[0](torch.zeros(4))
            runs.append(torch.stack([first, model[1](torch.zeros(4)), model[0](torch.zeros(4))]))
    assert torch.equal(*runs) and len({tuple(each) for each in runs[0].tolist()}) == 3


def test_a_record_begins_with_hook_module_and_step() -> None:
    model = nn.Sequential(nn.Identity()).eval()
    spec = {"s": {"select": "0", "hook": "forward", "action": "stats", "of": "sum"}}
    with hookrun.hooked(model, spec) as hooks:
        hooks.step()
        model({"a": torch.ones(3)})
    assert hooks.records == [
        {
            **{"hook": "s", "module": "0", "path": hooks.records[0]["path"], "action": "stats"},
            **{"mode": "eval", "epoch": 0, "step": 1, "call": 0, "sum": 3.0},
        }
    ]
    assert "a" in hooks.records[0]["path"]
