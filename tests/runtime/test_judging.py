"""A failed check raises at once under `error`; under other policies it is recorded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookrun
from hookrun.errors import CheckFailed


def test_a_failed_check_names_the_module_its_class_and_the_step() -> None:
    model = nn.Sequential(nn.Identity(), nn.ReLU())
    spec = {"c": {"select": "*", "hook": "forward", "action": "check", "finite": True, "policy": "error"}}
    with hookrun.hooked(model, spec) as hooks:
        model(torch.ones(2))
        assert not hooks.records
        with pytest.raises(CheckFailed, match=r"hook 'c' .* on 0 \(Identity\), epoch 0, step 0"):
            model(torch.tensor([1.0, torch.nan]))
        assert [record["class"] for record in hooks.records] == ["Identity"]


def test_a_warning_does_not_end_the_run() -> None:
    model = nn.Sequential(nn.Identity())
    spec = {"c": {"select": "0", "hook": "forward", "action": "check", "finite": True, "policy": "warn"}}
    with hookrun.hooked(model, spec) as hooks:
        for value in (1.0, torch.inf):
            model(torch.tensor([value]))
        assert [record["ok"] for record in hooks.records] == [False]
