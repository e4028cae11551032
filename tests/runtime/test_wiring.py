"""A model's own methods are not called by name; what runs outside of a call has its caller's frame."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hookrun
from hookrun.runtime.frames import call_frame


class OwnMethods(nn.Module):
    """Its methods have the names of torch's and mean something else."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def apply(self, rule: str, times: int) -> str:  # type: ignore[override]
        return rule * times

    def children(self) -> list[str]:  # type: ignore[override]
        return []

    def parameters(self) -> str:  # type: ignore[override]
        return "none"

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc(x)
        return output


@pytest.mark.parametrize("prefix", ["", "0."])
def test_a_model_s_own_methods_named_apply_or_children_are_not_called(prefix: str) -> None:
    model = nn.Sequential(OwnMethods()) if prefix else OwnMethods()
    spec = {
        "zero": {"select": f"{prefix}fc", "hook": "apply", "action": "fill", "value": 0},
        "one": {"select": f"{prefix}fc", "hook": "forward", "action": "add_bias", "value": 1},
    }
    plan = hookrun.compile(spec, model, example=((torch.ones(3, 2),), {}))
    assert plan.unchecked is None
    with plan.install(model):
        assert torch.equal(model(torch.ones(3, 2)), torch.ones(3, 2))


def test_outside_of_a_call_it_is_the_caller_s_frame() -> None:
    assert call_frame().f_code.co_name == "test_outside_of_a_call_it_is_the_caller_s_frame"
