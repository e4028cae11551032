"""Which parameters a run trains and in which groups of the optimizer, by name; mistakes in the names are told."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import hookrun
from hookrun.errors import Problem
from hookrun.spec.experiment import Train
from hookrun.tasks.training.parameter_groups import Trained, chosen

BIAS = {"select": "relu1", "hook": "forward", "action": "add_bias", "value": 0, "trainable": True}
HOOKS = {"shift": BIAS}
FROZEN = {"f": {"select": "fc", "hook": "apply", "action": "freeze"}}


class Net(nn.Module):
    """With a weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.relu1, self.conv2 = nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3)
        self.fc, self.tied = nn.Linear(4, 3), nn.Linear(4, 3, bias=False)
        self.tied.weight = self.fc.weight


def choice(
    hooks: dict[str, Any] | None = None, model: nn.Module | None = None, **train: Any
) -> tuple[Trained, list[Problem]]:
    spec = hookrun.load_spec({"hooks": hooks or {}})
    return chosen(Train.model_validate(train), spec, Net() if model is None else model)


def trained(hooks: dict[str, Any] | None = None, **train: Any) -> Trained:
    found, problems = choice(hooks, **train)
    assert problems == []
    return found


def told(hooks: dict[str, Any] | None = None, **train: Any) -> str:
    _, problems = choice(hooks, **train)
    return "\n".join(f"{each.where}: {each.what}\n  {each.hint}" for each in problems)


def groups(*members: dict[str, Any]) -> dict[str, Any]:
    return {"optimizer": {"name": "SGD", "lr": 0.1, "groups": list(members)}}


def test_parameters_are_chosen_by_module_by_name_and_by_the_hook_that_adds_them() -> None:
    everything = trained(HOOKS)
    assert everything.names[-1] == "relu1.shift_bias" and len(everything.names) == everything.count == 7
    assert (everything.elements, everything.frozen) == ((73, 73), frozenset()), "a shared weight counts once"
    assert trained(HOOKS, parameters=["hook:*", "fc.bias"]).names == ["fc.bias", "relu1.shift_bias"]
    rest = {"path": "**", "exclude": "conv*"}
    assert trained(HOOKS, parameters=rest).names == ["fc.weight", "fc.bias", "relu1.shift_bias"]
    assert trained(parameters="tied").names == ["fc.weight"]
    assert trained(HOOKS, parameters="hook:shift").elements == (0, 73)


def test_the_rest_is_frozen_also_what_hooks_add_later_and_the_chosen_stay_as_they_are() -> None:
    model = Net()
    found, _ = choice(HOOKS, model, parameters="fc")
    assert all(each.requires_grad for each in model.parameters()), "choosing changes nothing"
    model.relu1.register_parameter("shift_bias", nn.Parameter(model.conv1.bias.detach().clone()))
    model.fc.bias.requires_grad_(False)
    found.freeze_rest(model)
    assert [name for name, each in model.named_parameters() if each.requires_grad] == ["fc.weight"]
    assert "relu1.shift_bias" in found.frozen


def test_groups_have_their_parameters_in_the_order_of_the_model_and_the_others_come_first() -> None:
    found = trained(HOOKS, **groups({"select": ["hook:*", "fc"], "lr": 1}, {"select": "conv2.weight"}))
    assert [(group.where, group.names, dict(group.args)) for group in found.groups] == [
        ("", ("conv1.weight", "conv1.bias", "conv2.bias"), {}),
        ("train.optimizer.groups.0", ("fc.weight", "fc.bias", "relu1.shift_bias"), {"lr": 1}),
        ("train.optimizer.groups.1", ("conv2.weight",), {}),
    ]
    whole = trained(**groups({"select": "**", "lr": 1}))
    assert len(whole.groups) == 1 and whole.groups[0].where, "no empty group of the others"
    only = trained(parameters="fc", **groups({"select": "{fc,conv1}"}))
    assert [group.names for group in only.groups] == [("fc.weight", "fc.bias")]


def test_the_lines_of_the_plan_count_and_name_them() -> None:
    train = groups({"select": "conv*", "lr": 1}, {"select": "fc.bias"})
    spec = Train.model_validate(train)
    assert list(trained(**train).lines(spec.optimizer)) == [
        "trains all 6 parameters (73 of 73 elements) with SGD(lr=0.1)",
        "  groups.0 (conv*): lr=1 for conv1.weight, conv1.bias, conv2.weight, conv2.bias",
        "  groups.1 (fc.bias): no arguments for fc.bias",
    ]
    (line,) = trained(HOOKS, parameters=["fc", "hook:*"]).lines(spec.optimizer)
    assert line.startswith("trains 3 of 7 parameters (15 of 73 elements, without those that hooks add)")


@pytest.mark.parametrize("hooks, train, text", [
    ({}, groups({"select": "cnv1"}), "groups.0.select: 'cnv1' matches no parameter of Net\n  did you mean 'conv1'"),
    ({}, {"parameters": "fcc"}, "train.parameters: 'fcc' matches no parameter of Net\n  did you mean 'fc'?"),
    ({}, {"parameters": ["fc", "relu9"]}, "train.parameters.1: 'relu9' matches no parameter"),
    ({}, {"parameters": "relu1"}, "train.parameters: 'relu1' matches no parameter"),
    ({}, {"parameters": "hook:*"}, "train.parameters: 'hook:*': no hook adds parameters"),
    (HOOKS, {"parameters": ["fc", "hook:shft"]}, "train.parameters.1: 'hook:shft': there is no hook 'shft' that adds"),
    (HOOKS, {"parameters": "hook:shft"}, "did you mean 'shift'?"),
    ({"shift": {**BIAS, "enabled": False}}, {"parameters": "hook:shift"}, "no hook adds parameters"),
    (FROZEN, {"parameters": "fc"}, "'fc' names only parameters that are not trained: fc.weight, fc.bias"),
    ({}, {"parameters": "fc", **groups({"select": "conv1"})}, "are not trained: conv1.weight, conv1.bias"),
])  # fmt: skip
def test_a_wrong_name_is_told_where_it_is_with_the_nearest(hooks: Any, train: Any, text: str) -> None:
    assert text in told(hooks, **train)


def test_two_groups_with_one_parameter_and_a_model_with_nothing_to_train_are_refused() -> None:
    overlap = told(**groups({"select": "conv*"}, {"select": ["fc", "conv1.bias"]}, {"select": "tied"}))
    assert "groups.1.select: '[fc, conv1.bias]' and 'conv*' of groups.0 both name conv1.bias;" in overlap
    assert "groups.2.select: 'tied' and '[fc, conv1.bias]' of groups.1 both name fc.weight;" in overlap
    model = Net().requires_grad_(False)
    assert [each.where for each in choice(model=model)[1]] == ["train.parameters"]
    assert [each.where for each in choice(model=nn.ReLU())[1]] == ["train.parameters"]
