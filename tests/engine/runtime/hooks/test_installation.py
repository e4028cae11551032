"""`apply` hooks do not change a model again whose loaded state already contains their changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookrun
from hookrun.engine.runtime import Installation

ONES = {"select": "0", "hook": "apply", "action": "fill", "value": 1}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


class Counting(nn.Linear):
    """Its state has more than tensors."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        raise AssertionError("nobody asked")


@pytest.mark.parametrize("kind", [nn.Linear, Counting])
def test_a_hook_recorded_in_the_state_does_not_fill_again(kind: type[nn.Linear]) -> None:
    model = nn.Sequential(kind(2, 2))
    plan = hookrun.compile({"ones": ONES}, model)
    trained = model[0].weight.detach().clone()
    with Installation(plan, model, restored=plan.applied()):
        assert torch.equal(model[0].weight, trained)
    with Installation(plan, model):
        assert torch.equal(model[0].weight, torch.ones(2, 2))


def test_it_repeats_what_no_file_holds() -> None:
    spec = {
        "still": {"select": "0", "hook": "apply", "action": "freeze"},
        "more": {"select": "0", "hook": "apply", "action": "add_parameter", "name": "gain", "shape": [2]},
    }
    model = net()
    plan = hookrun.compile(spec, model)
    with Installation(plan, model, restored=plan.applied()):
        assert not model[0].weight.requires_grad
        assert "0.gain" in dict(model.named_parameters())
