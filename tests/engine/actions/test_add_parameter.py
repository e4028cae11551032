"""`add_parameter`: a new parameter, once."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from fake_site import build
from pydantic import ValidationError
from torch import nn

from hookrun.engine.actions import actions
from hookrun.engine.actions.add_parameter import AddParameter
from hookrun.engine.actions.base import add_parameter, remove_parameter, was_added
from hookrun.engine.hook_types import APPLY
from hookrun.engine.spec.hook import parse_hooks


def test_the_parameter_is_registered_with_its_value() -> None:
    module = nn.Linear(3, 2)
    assert build(AddParameter(name="gain", shape=[4, 2], value=[1, 2]))(module) is None
    assert isinstance(module.gain, nn.Parameter)
    assert torch.equal(module.gain, torch.tensor([[1.0, 2.0]] * 4))
    assert module.gain.requires_grad
    assert module.gain.is_leaf
    assert list(module.state_dict()) == ["weight", "bias", "gain"]


def test_the_initial_value_defaults_to_0() -> None:
    module = nn.ReLU()
    build(AddParameter(name="slope", shape=[]))(module)
    assert module.slope.shape == ()
    assert module.slope.item() == 0


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(2, 2).double(),
        nn.Sequential(nn.ReLU(), nn.Linear(2, 2).bfloat16()),
        nn.BatchNorm1d(2, affine=False).half(),
        nn.ReLU(),
        nn.LazyLinear(2),
        nn.Linear(2, 2, device="meta"),
    ],
)
def test_it_has_the_dtype_of_the_module(module: nn.Module) -> None:
    tensors = [*module.parameters(), *module.buffers()]
    lazy = any(isinstance(tensor, nn.UninitializedParameter) for tensor in tensors)
    like = torch.empty(0) if lazy or not tensors else tensors[0]
    build(AddParameter(name="gain", shape=[3], value=[1, 2, 3]))(module)
    assert module.gain.dtype == like.dtype
    assert module.gain.device == like.device


def test_an_earlier_parameter_of_another_shape_is_an_error() -> None:
    module = nn.Linear(3, 2)
    build(AddParameter(name="gain", shape=[2]))(module)
    other = AddParameter(name="gain", shape=[3])
    reason = other.incompatibility(APPLY, module, ["weight", "bias", "gain"])
    assert reason is not None
    assert reason.startswith("parameter 'gain' was added before with shape [2], not [3]")
    with pytest.raises(ValueError, match="was added before"):
        build(other)(module)


def test_a_tensor_that_does_not_broadcast_is_refused() -> None:
    action = AddParameter(name="gain", shape=[2], value={"file": "f.safetensors"})
    with pytest.raises(ValueError, match=r"shape \[3\], .*shape \[2\]"):
        build(action, values={"value": torch.ones(3)})(nn.ReLU())


def test_the_key_name_is_that_of_the_parameter() -> None:
    raw = {"select": "fc", "hook": "apply", "action": "add_parameter", "name": "gain", "shape": [2]}
    (hook,), problems = parse_hooks({"h": raw})
    action = hook.action
    assert problems == []
    assert isinstance(action, AddParameter)
    assert action.action_name == AddParameter.action_name == "add_parameter"
    assert actions()["add_parameter"] is AddParameter
    assert action.name == action.adds("h") == "gain"
    assert hook.to_dict()["action"] == "add_parameter"
    assert hook.to_dict()["params"]["name"] == "gain"
    assert copy.deepcopy(action) == pickle.loads(pickle.dumps(action)) == action
    assert action != AddParameter(name="other", shape=[2])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        *(({"name": name}, "expected a name: letters, digits and _") for name in ("", "a.b", "1st", "a b")),
        ({"shape": 4}, "expected a list of sizes"),
        ({"shape": [-1]}, "greater than or equal to 0"),
        ({"shape": [2.5]}, "integer"),
        ({"shape": [True]}, "integer"),
        ({"value": [1, 2, 3]}, r"shape \[3\], .*shape \[2\]"),
    ],
)
def test_a_name_a_shape_or_a_value_that_does_not_fit_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AddParameter(**{"name": "gain", "shape": [2], **keys})


def test_an_added_parameter_is_distinct_from_the_module_s() -> None:
    module = nn.Linear(1, 1)
    before = set(vars(module))
    add_parameter(module, "shift", nn.Parameter(torch.zeros(1)))
    for each in (module, copy.deepcopy(module)):
        assert was_added(each, "shift")
        assert not was_added(each, "weight")
    remove_parameter(module, "shift")
    assert not was_added(module, "shift")
    assert "shift" not in dict(module.named_parameters())
    assert set(vars(module)) == before
