"""model.json and hooks.json: each module once with all its names, and how often each hook fired where."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookrun
from hookrun.tasks.loop.facts import hook_facts, model_facts


def test_a_module_with_two_names_is_listed_once_with_both() -> None:
    shared = nn.Linear(2, 3)
    found = model_facts(nn.Sequential(shared, nn.ReLU(), nn.Sequential(shared)), weights="random")
    assert (found["class"], found["weights"]) == ("Sequential", "random")
    assert [(each["path"], each["names"], each["parameters"]) for each in found["modules"]] == [
        ("", [""], 9), ("0", ["0", "2.0"], 9), ("1", ["1"], 0), ("2", ["2"], 9),
    ]  # fmt: skip
    assert "weights" not in model_facts(shared)


@pytest.mark.filterwarnings("ignore::hookrun.HookrunWarning")  # that a hook never fired is its fact
def test_firings_are_counted_by_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with hookrun.hooked(
        model,
        {
            "edit": {"select": "0", "hook": "forward", "action": "scale", "factor": 2},
            "grad": {"select": "1", "hook": "output_grad", "action": "stats"},
        },
    ) as hooks:
        for _ in range(3):
            model(torch.ones(1, 2)).detach()
        sites = {(each["hook"], each["module"]): each for each in hook_facts(hooks)["sites"]}
    assert sites["edit", "0"]["fired"] == 3 and sites["grad", "1"]["fired"] == 0
    assert sites["edit", "0"]["silent"] is None
