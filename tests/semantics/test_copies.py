"""A deep copy or an unpickled copy of a hooked model works, is not hooked, and does not write into the records."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookrun
from hookrun.actions import actions
from hookrun.hook_types import HOOK_TYPES

X = torch.linspace(-1, 1, 6).reshape(2, 3)


def by_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # type: ignore[no-any-return]


def by_torch(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)  # type: ignore[no-any-return]


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": by_pickle,
    "torch.save": by_torch,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.act = nn.Tanh()
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.first(x)))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def step(model: nn.Module) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output = model(X.clone().requires_grad_())
    output.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return output.detach()


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_a_hooked_model_has_no_hooks(alone: dict[str, Any], way: str) -> None:
    model = net()
    with hookrun.hooked(model, {"h": {"select": "first", **alone}}) as hooks:
        other = WAYS[way](model)
        state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        before = dict(hooks.fired), len(hooks.records), repr(hooks.captures)
        found = step(other)
        assert (dict(hooks.fired), len(hooks.records), repr(hooks.captures)) == before
        step(model)
        assert before[0] != hooks.fired or alone["hook"] == "apply"
    plain = net()
    if alone["action"] == "add_parameter":
        plain.first.register_parameter("extra", nn.Parameter(torch.zeros(3)))
    plain.load_state_dict(state)
    assert torch.equal(found, plain(X)), "what the model computes without hooks"


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_a_hooked_model_can_be_hooked(way: str) -> None:
    model = net()
    spec = {
        "seen": {"select": "**", "hook": "forward", "action": "capture"},
        "double": {"select": "first", "hook": "forward", "action": "scale", "factor": 2},
    }
    with hookrun.hooked(model, spec) as hooks:
        other = WAYS[way](model)
        with hookrun.hooked(other, spec) as others:
            found = other(X)
        assert hooks.fired["double", "first"] == 0
        assert torch.equal(found, model(X))
    assert others.fired["double", "first"] == 1
    assert torch.equal(others.captures["seen"]["act"][0], hooks.captures["seen"]["act"][0])
    assert torch.equal(other(X), model(X))


def test_the_state_dict_of_a_hooked_model_loads_into_a_model_without_hooks() -> None:
    model = net()
    observers = {
        f"{name}_{hook}": {"select": "first", "hook": hook, "action": name}
        for name, action in actions().items()
        for hook, kind in HOOK_TYPES.items()
        if kind in action.hook_types and action.observes
    }
    with hookrun.hooked(model, observers):
        state = model.state_dict()
    assert list(state) == list(net().state_dict())
    net().load_state_dict(state)


def test_an_added_parameter_is_in_the_state_dict_until_it_is_uninstalled() -> None:
    model = net()
    spec = {
        "offset": {"select": "act", "hook": "forward", "action": "add_bias", "value": 0.5, "trainable": True}
    }
    with hookrun.hooked(model, spec) as hooks:
        with_it = model.state_dict()
        hooks.uninstall_parameters()
        without = model.state_dict()
    assert set(with_it) - set(without) == {"act.offset_bias"}
    net().load_state_dict(without)
    with pytest.raises(RuntimeError, match=r"act\.offset_bias"):
        net().load_state_dict(with_it)
    again = net()
    with hookrun.hooked(again, spec):  # a model with the same hooks loads it
        again.load_state_dict(with_it)


def test_a_copy_made_in_the_middle_of_a_forward_is_not_hooked() -> None:
    model = net()
    copies: list[nn.Module] = []
    model.act.register_forward_hook(lambda *_: copies.append(copy.deepcopy(model)))
    spec = {
        "back": {"select": "**", "hook": "backward", "action": "capture"},
        "saved": {"select": "**", "hook": "saved_tensors", "action": "offload", "to": "cpu"},
        "out": {"select": "**", "hook": "forward", "action": "capture"},
    }
    with hookrun.hooked(model, spec) as hooks:
        model(X)
        fired = dict(hooks.fired)
        step(copies[0])
        assert hooks.fired == fired
