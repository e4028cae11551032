"""A failed check raises or is recorded, and names the last module before it that passed."""

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


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Flatten())


def checks(policy: str) -> dict[str, object]:
    return {"sound": {"select": "*", "hook": "forward", "action": "check", "policy": policy}}


def test_the_last_good_module_is_of_the_current_pass() -> None:
    model = net()
    with hookrun.hooked(model, checks("error")):
        model(torch.ones(2, 4))
        with torch.no_grad():
            model[2].weight[0, 0] = float("nan")
        with pytest.raises(hookrun.CheckFailed, match=r"on 2 \(Linear\),.* found nan; last good: 1 \(ReLU\)"):
            model(torch.ones(2, 4))
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    first = pytest.raises(hookrun.CheckFailed, match=r"on 0 \(Linear\), .* found nan$")
    with first, hookrun.hooked(model, checks("error")):
        model(torch.ones(2, 4))


def test_results_that_are_read_later_name_the_same_module() -> None:
    model = net()
    with hookrun.hooked(model, checks("stop")) as hooks:
        model(torch.ones(2, 4))
        with torch.no_grad():
            model[2].weight[0, 0] = float("nan")
        model(torch.ones(2, 4))
        model(torch.full((2, 4), float("nan")))
        found = [(each["module"], each["class"], each["last_good"]) for each in hooks.records]
        assert str(hooks.stopped).startswith("hook 'sound' on 2 (Linear): expected")
    assert found[:2] == [("2", "Linear", "1 (ReLU)"), ("3", "Flatten", "1 (ReLU)")]
    assert found[2] == ("0", "Linear", None), "what passed in the pass before is not before it"
