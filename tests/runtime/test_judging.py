"""A failed check raises at once under `error`, and leaves a record to be read otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookrun
from hookrun.errors import CheckFailed


def test_a_failed_check_says_the_module_its_class_and_when() -> None:
    model = nn.Sequential(nn.Identity(), nn.ReLU())
    spec = {"c": {"select": "*", "hook": "forward", "action": "check", "finite": True, "policy": "error"}}
    with hookrun.hooked(model, spec) as hooks:
        model(torch.ones(2))
        assert not hooks.records
        with pytest.raises(CheckFailed, match=r"hook 'c' .* on 0 \(Identity\), epoch 0, step 0"):
            model(torch.tensor([1.0, torch.nan]))
        assert [record["class"] for record in hooks.records] == ["Identity"]


def test_a_warning_lets_the_run_go_on() -> None:
    model = nn.Sequential(nn.Identity())
    spec = {"c": {"select": "0", "hook": "forward", "action": "check", "finite": True, "policy": "warn"}}
    with hookrun.hooked(model, spec) as hooks:
        for value in (1.0, torch.inf):
            model(torch.tensor([value]))
        assert [record["ok"] for record in hooks.records] == [False]
