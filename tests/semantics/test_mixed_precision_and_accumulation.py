"""Mixed precision and accumulation: hooks see unscaled gradients, per micro-batch or per step as their type says."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.testing import assert_close

import hookrun
from hookrun.cli import main

X = torch.linspace(-1, 1, 16).reshape(4, 4)
ON_MODULE = ["output_grad", "backward", "backward_pre"]
ON_PARAMETER = ["grad", "post_accumulate_grad", "optimizer_step_pre"]


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def selected(kind: str) -> str:
    return "2" if kind in ON_MODULE else "2.weight"


def scaled_step(
    model: nn.Module,
    scaler: GradScaler,
    optimizer: torch.optim.Optimizer,
    factor: float = 1.0,
    unscale: bool = False,
) -> None:
    optimizer.zero_grad()
    scaler.scale(model(X.to(next(model.parameters()).dtype)).sum() * factor).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def tensors(value: Any) -> list[Tensor]:
    match value:
        case Tensor():
            return [value]
        case dict():
            return [each for member in value.values() for each in tensors(member)]
        case tuple() | list():
            return [each for member in value for each in tensors(member)]
    return []


@pytest.mark.parametrize("kind", ON_MODULE + ON_PARAMETER)
def test_under_a_gradient_scaler_hooks_see_the_true_gradients(kind: str) -> None:
    """PyTorch's own hooks see 65536 for a gradient of 1."""
    scaler, model = GradScaler("cpu"), net()
    plain = copy.deepcopy(model)
    spec = {"h": {"select": selected(kind), "hook": kind, "action": "capture"}}
    plan = hookrun.compile(spec, model)
    with plan.install(model, scaler=scaler) as hooks:
        scaled_step(model, scaler, torch.optim.SGD(model.parameters(), lr=0.1))
    with plan.install(plain) as expected:
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        plain(X).sum().backward()
        optimizer.step()
    path = selected(kind)
    found = tensors(hooks.captures["h"][path])
    assert found
    for ours, theirs in zip(found, tensors(expected.captures["h"][path]), strict=True):
        assert_close(ours, theirs)
    for name, parameter in plain.named_parameters():
        assert_close(model.get_parameter(name), parameter)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("action", [{"action": "clamp", "max": 0.3}, {"action": "add_bias", "value": 0.1}])
@pytest.mark.parametrize("kind", ON_MODULE + ON_PARAMETER)
def test_an_edit_acts_on_the_true_gradient_and_the_optimizer_uses_it(
    kind: str, action: dict[str, Any], unscale: bool
) -> None:
    scaler, model = GradScaler("cpu", init_scale=2.0**10), net()
    plain = copy.deepcopy(model)
    plan = hookrun.compile({"h": {"select": selected(kind), "hook": kind, **action}}, model)
    with plan.install(model, scaler=scaler) as hooks:
        scaled_step(model, scaler, torch.optim.SGD(model.parameters(), lr=0.1), unscale=unscale)
    with plan.install(plain):
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        plain(X).sum().backward()
        optimizer.step()
    assert sum(hooks.fired.values()) == 1
    for name, parameter in plain.named_parameters():
        assert_close(model.get_parameter(name), parameter)


def test_small_gradients_in_half_precision_are_not_lost() -> None:
    """The scaler's factor keeps them from underflowing; hooks see the unscaled gradients in 32 bits."""
    scaler, model = GradScaler("cpu", init_scale=2.0**14), net(torch.float16)
    spec = {"h": {"select": "2", "hook": "output_grad", "action": "capture"}}
    with hookrun.compile(spec, model).install(model, scaler=scaler) as hooks:
        scaler.scale(model(X.half()).float().sum() * 1e-8).backward()
    assert_close(hooks.captures["h"]["2"][0], torch.full((4, 2), 1e-8), rtol=1e-2, atol=0)


def test_a_step_that_the_scaler_skips_does_not_count_as_a_step() -> None:
    scaler, model = GradScaler("cpu"), net()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    spec = {
        "pre": {"select": "**", "hook": "optimizer_step_pre", "action": "clip_norm", "max_norm": 0.1},
        "post": {"select": "2.weight", "hook": "optimizer_step_post", "action": "capture"},
    }
    with hookrun.compile(spec, model).install(model, scaler=scaler) as hooks:
        scaled_step(model, scaler, torch.optim.SGD(model.parameters(), lr=0.1), factor=float("inf"))
        assert set(hooks.fired.values()) == {0}
        assert_close([p.detach() for p in model.parameters()], before)
        scaled_step(model, scaler, torch.optim.SGD(model.parameters(), lr=0.1))
        assert set(hooks.fired.values()) == {1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_values_are_those_of_pytorchs_own_hooks(dtype: torch.dtype) -> None:
    model = net()
    seen: list[Tensor] = []
    model[2].register_forward_hook(lambda _m, _a, output: output.register_hook(seen.append) and None)
    model[2].register_forward_hook(lambda _m, _a, output: seen.append(output.detach().clone()))
    spec = {
        "grads": {"select": "2", "hook": "output_grad", "action": "capture"},
        "out": {"select": "2", "hook": "forward", "action": "capture"},
    }
    with hookrun.hooked(model, spec) as hooks, torch.autocast("cpu", dtype):
        output = model(X)
        output.float().square().sum().backward()
    assert output.dtype == dtype
    assert_close([*hooks.captures["out"]["2"], *hooks.captures["grads"]["2"]], seen)


# ---- accumulation


def accumulated(model: nn.Module, spec: dict[str, Any], parts: int, scaler: GradScaler | None = None) -> Any:
    """Two optimizer steps of `parts` micro-batches each, in a user's own loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hookrun.compile(spec, model).install(model, scaler=scaler) as hooks:
        for _ in range(2):
            for number, part in enumerate(X.chunk(parts)):
                hooks.accumulating = number < parts - 1
                loss = model(part).square().sum()
                (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            hooks.step()
    return hooks


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("kind", "per_step"),
    [
        ("grad", 4),
        ("output_grad", 4),
        ("post_accumulate_grad", 1),
        ("optimizer_step_pre", 1),
        ("optimizer_step_post", 1),
    ],
)
def test_hook_types_fire_per_micro_batch_or_per_step(kind: str, per_step: int, scaled: bool) -> None:
    scaler = GradScaler("cpu") if scaled else None
    hooks = accumulated(
        net(), {"h": {"select": selected(kind), "hook": kind, "action": "capture"}}, 4, scaler
    )
    assert hooks.fired["h", selected(kind)] == 2 * per_step


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", ["post_accumulate_grad", "optimizer_step_pre"])
@pytest.mark.parametrize("action", [{"action": "scale", "factor": 0.5}, {"action": "clamp", "max": 0.2}])
def test_four_micro_batches_give_the_gradient_of_one_large_batch(
    kind: str, action: dict[str, Any], scaled: bool
) -> None:
    """With PyTorch's own hook, a scale of 0.5 on each of four micro-batches gives 0.94 of one gradient, not 2."""
    spec = {"h": {"select": "**", "hook": kind, **action}}
    whole, parts = net(), net()
    accumulated(whole, spec, 1)
    accumulated(parts, spec, 4, GradScaler("cpu") if scaled else None)
    for name, parameter in whole.named_parameters():
        assert_close(parts.get_parameter(name), parameter, rtol=1e-4, atol=1e-6)


def test_grad_acts_on_each_micro_batch() -> None:
    model = net()
    by_hand = copy.deepcopy(model)
    by_hand[2].weight.register_hook(lambda grad: grad.clamp(max=0.2))
    for part in X.chunk(4):
        by_hand(part).square().sum().backward()
    spec = {"h": {"select": "2.weight", "hook": "grad", "action": "clamp", "max": 0.2}}
    with hookrun.hooked(model, spec):
        for part in X.chunk(4):
            model(part).square().sum().backward()
    assert_close(model[2].weight.grad, by_hand[2].weight.grad)


def test_when_step_counts_optimizer_steps_and_not_micro_batches() -> None:
    spec = {"h": {"select": "2.weight", "hook": "grad", "action": "print", "when": {"step": 1}}}
    hooks = accumulated(net(), spec, 4)
    assert [record["step"] for record in hooks.records] == [1] * 4


def test_clip_norm_is_per_tensor_on_grad_and_over_all_before_the_step() -> None:
    for kind in ("grad", "optimizer_step_pre"):
        model, by_hand = net(), net()
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, by_hand)]
        with hookrun.hooked(
            model, {"h": {"select": "**", "hook": kind, "action": "clip_norm", "max_norm": 0.1}}
        ):
            model(X).square().sum().backward()
            optimizers[0].step()
        by_hand(X).square().sum().backward()
        if kind == "grad":
            for parameter in by_hand.parameters():
                nn.utils.clip_grad_norm_([parameter], 0.1)
        else:
            nn.utils.clip_grad_norm_(by_hand.parameters(), 0.1)
        optimizers[1].step()
        for name, parameter in by_hand.named_parameters():
            assert_close(model.get_parameter(name), parameter)


# ---- hookrun's own loop


COMMAND = (
    "compute.device=cpu", "compute.threads=1", "model=mlp", "train.epochs=1", "train.shuffle=false",
    "train.optimizer.name=SGD", "train.optimizer.lr=0.1", "train.steps=2",
)  # fmt: skip


def run(folder: Path, name: str, *overrides: str) -> hookrun.Run:
    assert main([*COMMAND, f"hydra.run.dir={folder / name}", *overrides]) == 0
    return hookrun.open_run(folder / name)


@pytest.mark.parametrize("kind", ["post_accumulate_grad", "optimizer_step_pre"])
def test_a_run_with_accumulation_equals_a_run_with_larger_batches(kind: str, tmp_path: Path) -> None:
    seen = f"+hooks.seen={{select: '**', hook: {kind}, action: capture}}"
    clip = f"+hooks.clip={{select: '**', hook: {kind}, action: clamp, max: 0.01}}"
    whole = run(tmp_path, "whole", seen, clip, "data.batch_size=64")
    parts = run(tmp_path, "parts", seen, clip, "data.batch_size=16", "train.accumulate=4")
    for path in whole.captures["seen"]:
        ours, theirs = parts.captures["seen"][path], whole.captures["seen"][path]
        assert ours.shape == theirs.shape
        assert_close(ours[0], theirs[0], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_in_mixed_precision_records_true_gradients(precision: str, tmp_path: Path) -> None:
    seen = "+hooks.seen={select: '**', hook: grad, action: capture}"
    plain = run(tmp_path, "plain", seen, "train.steps=1")
    mixed = run(tmp_path, "mixed", seen, "train.steps=1", f"compute.precision={precision}")
    for path in plain.captures["seen"]:
        ours, theirs = mixed.captures["seen"][path][0], plain.captures["seen"][path][0]
        assert (ours - theirs).norm() <= 0.05 * theirs.norm()
