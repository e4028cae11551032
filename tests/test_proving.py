"""Shapes are checked on a fake copy; the model itself is not changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookrun
from hookrun.errors import CompileError, HookrunError


class Branching(nn.Module):
    """Its forward depends on values, which a fake tensor does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) if x.sum() > 0 else self.fc(-x)


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 3)
    )


EXAMPLE = ((torch.zeros(2, 1, 8, 8),), {})


def compile_one(model: nn.Module, example: Any = EXAMPLE, **hook: Any) -> hookrun.Plan:
    return hookrun.compile({"h": {"hook": "forward", **hook}}, model, example=example)


def test_the_plan_shows_the_output_shape_of_each_module() -> None:
    plan = compile_one(net(), select="*", action="print")
    shapes = [target.shape for target in plan.hooks[0].matches]
    assert shapes == ["[2, 4, 6, 6]", "[2, 4, 6, 6]", "[2, 4, 6, 6]", "[2, 144]", "[2, 3]"]


def test_the_plan_shows_the_bytes_of_a_capture() -> None:
    (target,) = compile_one(net(), select="4", action="capture").hooks[0].matches
    assert (target.bytes, target.per_sample) == (12, True)


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (
            {"select": "4", "action": "add_bias", "value": [1, 2]},
            "does not broadcast to the tensor's shape [2, 3]",
        ),
        ({"select": "4", "action": "scale", "factor": 2, "index": "..., 3"}, "index 3 is out of bounds"),
        ({"select": "4", "action": "scale", "factor": 2, "index": ":, 3:9"}, "selects nothing"),
        (
            {"select": "4", "action": "scale", "factor": 2, "target": "logits"},
            "'logits' is not in the tensor of shape [2, 3]",
        ),
        (
            {"select": "4", "hook": "forward_pre", "action": "scale", "factor": 2, "target": "[1]"},
            "is not in the tuple",
        ),
        ({"select": "4", "hook": "grad", "action": "scale", "factor": 2, "index": "7"}, "out of bounds"),
        ({"select": "4", "hook": "output_grad", "action": "add_bias", "value": [1, 2]}, "does not broadcast"),
        (
            {"select": "4", "hook": "optimizer_step_post", "action": "add_bias", "value": [1, 2]},
            "does not broadcast",
        ),
    ],
)
def test_a_hook_that_does_not_fit_is_refused(hook: dict[str, Any], said: str) -> None:
    with pytest.raises(CompileError) as caught:
        compile_one(net(), **hook)
    assert said in str(caught.value)
    assert caught.value.errors[0].where == "hooks.h"


@pytest.mark.parametrize("hook", ["output_grad", "backward", "backward_pre"])
def test_a_gradient_hook_where_there_is_no_gradient_is_refused(hook: str) -> None:
    model = net()
    model.requires_grad_(False)
    with pytest.raises(CompileError, match=r"on 0: .*carries no gradient"):
        compile_one(model, select="0", hook=hook, action="print")


def test_the_model_is_not_changed() -> None:
    model = net().train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.get_rng_state()
    spec = {
        "n": {"select": "0", "hook": "forward", "action": "noise"},
        "g": {"select": "**", "hook": "grad", "action": "scale", "factor": 2},
        "b": {"select": "4", "hook": "forward", "action": "add_bias", "value": 1, "trainable": True},
        "f": {"select": "0", "hook": "apply", "action": "fill", "value": 0},
        "o": {"select": "**", "hook": "optimizer_step_post", "action": "clamp", "max": 0},
        "c": {"select": "**", "hook": "forward", "action": "check"},
    }
    hookrun.compile(spec, model, example=EXAMPLE)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training
    assert torch.equal(torch.get_rng_state(), generator)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_nothing_is_printed_and_no_check_fails_while_checking(capsys, caplog) -> None:
    spec = {
        "p": {"select": "**", "hook": "forward", "action": "print", "what": "value"},
        "c": {"select": "**", "hook": "forward", "action": "check", "min": 5, "policy": "error"},
    }
    hookrun.compile(spec, net(), example=EXAMPLE)
    assert capsys.readouterr() == ("", "")
    assert not caplog.records


def test_a_model_that_cannot_run_without_data_is_unchecked_with_the_reason() -> None:
    plan = compile_one(Branching(), example=((torch.ones(1, 2),), {}), select="fc", action="capture")
    assert plan.unchecked is not None and "DataDependent" in plan.unchecked
    assert "shapes unchecked" in str(plan)


def test_an_example_of_the_wrong_shape_is_a_reason_too() -> None:
    plan = compile_one(net(), example=((torch.ones(1, 2),), {}), select="4", action="capture")
    assert plan.unchecked is not None


def test_a_single_tensor_is_refused_as_an_example() -> None:
    with pytest.raises(HookrunError, match=r"expected \(args, kwargs\)"):
        compile_one(net(), example=torch.zeros(2, 1, 8, 8), select="4", action="capture")


def test_a_module_that_the_example_does_not_reach_is_noted() -> None:
    attention = nn.MultiheadAttention(4, 2)
    x = torch.zeros(3, 1, 4)
    plan = compile_one(attention, example=((x, x, x), {}), select="out_proj", action="capture")
    assert plan.hooks[0].matches[0].called is False
    assert "the example did not reach out_proj" in str(plan)


def test_the_mode_can_be_chosen() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    plan = hookrun.compile({}, model, example=((torch.ones(1, 2),), {}), training=True)
    assert plan.unchecked is not None and "more than 1 value" in plan.unchecked
    assert hookrun.compile({}, model, example=((torch.ones(1, 2),), {}), training=False).unchecked is None
