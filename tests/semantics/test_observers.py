"""Observers change nothing: the training of ten models is bit-equal with and without them."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from hooking import one_hook
from small_nets import Net
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

import hookrun

STEPS = 15
IMAGE_STEPS = 6


def residual(model: Any, x: Tensor) -> Tensor:
    """In-place operations, by modules and by functions, before and after the layers."""
    y = model.body(x)
    y += x
    return functional.hardtanh_(model.act(y) * 2)


def reused() -> Net:
    """One layer under two names, called three times."""
    layer = nn.Linear(6, 6)
    tail = nn.Sequential(nn.Tanh(), layer)
    return Net(lambda m, x: m.tail(m.same(m.layer(x))), layer=layer, same=layer, tail=tail)


def split(model: Any, x: Tensor) -> dict[str, Any]:
    return {"both": model.layer(x).chunk(2, dim=-1), "none": None, "sum": x.sum()}


def joined(_: nn.Module, *, parts: dict[str, Any], scale: float) -> Tensor:
    return torch.cat(parts["both"], dim=-1) * scale + parts["sum"]


def containers() -> Net:
    """Dictionaries, tuples and None between the layers, keyword arguments."""
    modules = {"split": Net(split, layer=nn.Linear(6, 6)), "join": Net(joined)}
    return Net(lambda m, x: m.join(parts=m.split(x), scale=2.0), **modules)


def recurrent() -> Net:
    lstm = nn.LSTM(6, 6, num_layers=2, dropout=0.2, batch_first=True)
    return Net(lambda m, x: m.lstm(x.unsqueeze(1))[0][:, 0], lstm=lstm)


def attention() -> Net:
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Net(lambda m, x: m.encoder(x.unsqueeze(0))[0], encoder=encoder)


def embedded(model: Any, x: Tensor) -> Tensor:
    """From integers; with a frozen part and an unused output."""
    model.idle(x)
    return model.head(model.frozen(model.table((x.abs() * 3).long().clamp(max=9)).mean(1)))


def linear() -> nn.Linear:
    return nn.Linear(6, 6)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": torchvision.models.resnet18,
    "transformer encoder": attention,
    "dropout": lambda: nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 6)),
    "reused and shared": reused,
    "in place": lambda: Net(
        residual, body=nn.Sequential(linear(), nn.ReLU(inplace=True), linear()), act=nn.ReLU(inplace=True)
    ),
    "containers": containers,
    "recurrent": recurrent,
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Hardswish(inplace=True)),
    "embedded and frozen": lambda: Net(
        embedded,
        table=nn.Embedding(10, 6),
        frozen=linear().requires_grad_(False),
        idle=linear(),
        head=linear(),
    ),
    "returns its input": lambda: nn.Sequential(nn.Identity(), nn.Linear(6, 6), nn.Flatten(), nn.Dropout(0.0)),
}

SMALL = [name for name in MODELS if name != "resnet18"]


@pytest.mark.parametrize("name", MODELS)
def test_observed_outputs_are_bit_equal(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain, observed = pair(name)
    expected = trained(plain, None)
    found = trained(observed, everywhere(observed))
    assert found["fired"] > STEPS
    assert list(found["state"]) == list(expected["state"])
    for key, value in expected["state"].items():
        assert torch.equal(found["state"][key], value)
    assert torch.equal(found["rng"], expected["rng"])
    for number, (ours, theirs) in enumerate(zip(found["seen"], expected["seen"], strict=True)):
        assert torch.equal(ours, theirs), f"at step {number // 4}"


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("kinds", [["output_grad"], ["backward", "backward_pre"]], ids=",".join)
def test_observed_gradients_are_equal_within_rounding(name: str, kinds: list[str]) -> None:
    plain, observed = pair(name)
    hook = {"select": with_gradient(plain), "when": {"step": {"every": 10}}}
    each = itertools.product(kinds, ("capture", "stats"))
    spec = {f"{action}_{kind}": {**hook, "hook": kind, "action": action} for kind, action in each}
    expected = trained(plain, None)
    found = trained(observed, spec)
    assert found["fired"] > 0
    assert torch.equal(found["rng"], expected["rng"])
    within = {"rtol": 0, "atol": 0} if kinds == ["output_grad"] else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(found["seen"], expected["seen"], **within)


@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.Tanh, nn.ReLU], ids=lambda kind: kind.__name__)
def test_captures_leave_gradients_of_writes_alone(activation: Any) -> None:
    def gradients(hooks: dict[str, Any], *, warm: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Net(lambda m, x: m.act(m.fc(x)), fc=nn.Linear(6, 6), act=activation())
        x = torch.linspace(-1, 1, 12).reshape(2, 6)
        with hookrun.hooked(model, hooks):
            for _ in range(2 * warm):
                model(x)
            with torch.autograd.graph.allow_mutation_on_saved_tensors():
                model(x).mul_(2).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]

    for warm in (False, True):
        capture = one_hook("**")
        for found, expected in zip(gradients(capture, warm=warm), gradients({}, warm=warm), strict=True):
            assert torch.equal(found, expected)


def with_gradient(model: nn.Module) -> Any:
    """Selects the modules whose output in a forward requires a gradient."""
    skipped = []
    for path, module in model.named_modules():
        found: list[bool] = []
        handle = module.register_forward_hook(lambda _m, _a, output: found.append(_requires(output)))  # noqa: B023
        model(torch.ones(2, 6))
        handle.remove()
        if not any(found):
            skipped.append(path)
    return {"path": "**", "exclude": skipped} if skipped else "**"


def _requires(value: Any) -> bool:
    return any(leaf.requires_grad for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def everywhere(model: nn.Module) -> dict[str, Any]:
    """Every observer on every hook type, on every module that can carry it."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    often = {"step": {"every": 5}}
    observers: dict[str, dict[str, Any]] = {
        "capture": {"when": {"probability": 0.2}},
        "stats": {"when": often},
        "print": {"when": {"step": [3]}},
        "check": {"finite": True, "policy": "warn"},
    }
    hooks = dict[str, Any]()
    for hook in ("forward_pre", "forward"):
        for action, keys in observers.items():
            hooks[f"{action}_{hook}"] = {"select": "**", "hook": hook, "action": action, **keys}
    for hook in ("grad", "post_accumulate_grad", "optimizer_step_pre", "optimizer_step_post"):
        for action in ("capture", "stats", "check"):
            hooks[f"{action}_{hook}"] = {"select": trained, "hook": hook, "action": action, "when": often}
    hooks["saved"] = {"select": "", "hook": "saved_tensors", "action": "stats", "of": ["bytes"]}
    hooks["out"] = {"select": "", "hook": "output_grad", "action": "capture", "when": often}
    return hooks


def trained(model: nn.Module, hooks_of: dict[str, Any] | None) -> dict[str, Any]:
    """Train; returns the final state, and the outputs and gradients of every step."""
    images = isinstance(model, torchvision.models.ResNet)
    shape = (2, 3, 8, 8) if images else (2, 6)
    batch = torch.linspace(-1, 1, math.prod(shape)).reshape(shape)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    torch.manual_seed(1)
    seen = list[Tensor]()
    with hookrun.hooked(model, hooks_of or {}) as hooks:
        for _ in range(IMAGE_STEPS if images else STEPS):
            x = batch.clone().requires_grad_()
            optimizer.zero_grad()
            output = model(x)
            output.square().mean().backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            seen += [output.detach().clone(), x.grad if x.grad is not None else torch.empty(0)]
            seen += [torch.stack([g.double().norm() for g in gradients]), gradients[0].clone()]
            optimizer.step()
            hooks.step()
    fired = sum(hooks.fired.values())
    return {"seen": seen, "state": model.state_dict(), "rng": torch.get_rng_state(), "fired": fired}


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = MODELS[name]()
    return model, copy.deepcopy(model)
