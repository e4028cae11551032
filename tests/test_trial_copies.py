"""Copies to try hooks on: cheap ones are used only where their results equal those of fake tensors."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet18

import hookrun
from hookrun import proving
from hookrun.errors import CompileError
from hookrun.models.networks import CNN
from hookrun.trial_copies import quick_copy

IMAGES = ((torch.zeros(2, 1, 8, 8),), {})
PICTURES = ((torch.zeros(2, 3, 64, 64),), {})


def device_of(model: nn.Module, example: Any, *, may_compute: bool = True) -> str | None:
    copied = quick_copy(model, example, may_compute=may_compute)
    return None if copied is None else next(copied.model.parameters()).device.type


class OfTheUser(nn.Sequential):
    """Its forward may do anything."""


def test_a_small_model_is_copied_with_data_and_a_large_one_without() -> None:
    assert device_of(CNN(1, (8, 8), 10), IMAGES) == "cpu"
    assert device_of(CNN(1, (8, 8), 10), IMAGES, may_compute=False) == "meta"
    assert device_of(resnet18(), PICTURES) == "meta"


def test_modules_that_may_read_their_device_or_are_not_torchs_have_no_cheap_copy() -> None:
    linear, tensor = nn.Linear(2, 2), ((torch.zeros(1, 2),), {})
    assert device_of(nn.Sequential(linear), tensor) == "cpu"
    hooked, patched = nn.Linear(2, 2), nn.Linear(2, 2)
    hooked.register_forward_hook(lambda module, args, output: None)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    attention = nn.TransformerEncoderLayer(4, 1)
    for model in (
        OfTheUser(linear),
        hooked,
        patched,
        attention,
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    ):
        assert device_of(model, tensor) is None, model
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    assert device_of(linear, tensor) is None
    handle.remove()
    assert device_of(linear, ((torch.zeros(2, 2)[:1],), {})) is None  # a view


def test_the_copy_shares_nothing_with_the_model_and_keeps_shared_tensors() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.append(model[0])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for may_compute in (True, False):
        copied = quick_copy(model, ((torch.ones(3, 2),), {}), may_compute=may_compute)
        assert copied is not None and copied.model[2] is copied.model[0]
        copied.model.train()(*copied.args).sum().backward()
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())


HOOKS: list[dict[str, Any]] = [
    {"hook": "forward", "action": "capture"},
    {"hook": "forward", "action": "add_bias", "value": 0.5},
    {"hook": "backward", "action": "stats"},
    {"hook": "output_grad", "action": "clamp", "min": 0},
    {"hook": "optimizer_step_pre", "action": "clip_norm", "max_norm": 1},
    {"hook": "saved_tensors", "action": "offload", "to": "disk"},
    {"hook": "forward", "action": "noise", "std": 1},
    {"hook": "forward", "action": "check", "max": -1, "policy": "error"},
    {"hook": "forward", "action": "add_bias", "value": [1, 2, 3]},
    {"hook": "forward", "action": "scale", "factor": 2, "index": "..., 7000"},
]


def test_the_plan_and_the_errors_are_those_of_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(model: nn.Module, example: Any, hooks: list[dict[str, Any]]) -> tuple[Any, ...]:
        spec = {f"h{number}": {"select": "fc", **hook} for number, hook in enumerate(hooks)}
        try:
            plan = hookrun.compile({"hooks": spec}, model, example=example)
        except CompileError as error:
            return (str(error),)
        return plan.hooks, plan.unchecked

    small, large = CNN(1, (8, 8), 10), resnet18()

    def outcomes() -> list[tuple[Any, ...]]:
        """The outcome of each hook alone for the small model, and of fitting and other hooks for the large one."""
        each = [outcome(small, IMAGES, [hook]) for hook in HOOKS]
        return [*each, outcome(large, PICTURES, HOOKS[:-2]), outcome(large, PICTURES, HOOKS[-2:])]

    quick = outcomes()
    monkeypatch.setattr(proving, "quick_copy", lambda *args, **options: None)
    assert quick == outcomes()
    assert [len(each) for each in quick] == [2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 2, 1]
    assert all(f"hooks.h{number}" in quick[-1][0] for number in (0, 1)), "both mistakes"


def test_a_user_s_function_is_called_with_fake_tensors_only() -> None:
    seen = list[Tensor]()

    def own(x: Tensor) -> Tensor:
        seen.append(x)
        return x * 2

    model = nn.Sequential(nn.Linear(2, 2))
    hookrun.compile(
        {"hooks": {"h": {"select": "0", "hook": "forward", "action": "replace", "value": own}}},
        model,
        example=((torch.zeros(1, 2),), {}),
    )
    assert seen and all(type(x).__name__ == "FakeTensor" for x in seen)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_other_attributes_of_a_module_are_neither_copied_nor_an_error() -> None:
    example = ((torch.zeros(1, 2),), {})
    hook = {"h": {"select": "0", "hook": "forward", "action": "capture"}}

    def holding(value: Any) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2))
        model[0].kept = value
        return model

    for value in (torch.ones(2, requires_grad=True) * 2, {"cache": [torch.ones(2)]}, (nn.Linear(1, 1),)):
        model = holding(value)
        assert device_of(model, example) is None
        assert hookrun.compile(hook, model, example=example).unchecked is None
    assert "cannot pickle" in str(hookrun.compile(hook, holding(threading.Lock()), example=example).unchecked)
    assert device_of(holding((1, "two", None, {"three": torch.float32})), example) == "cpu"
