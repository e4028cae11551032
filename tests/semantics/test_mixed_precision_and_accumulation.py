"""Hooks see unscaled gradients per micro-batch or per step, and those that the optimizer uses, in any thread."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hooking import one_hook
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

import hookrun
from hookrun.engine.runtime.apply_action import run_unscaled

X = torch.linspace(-1, 1, 16).reshape(4, 4)
ON_MODULE = ["output_grad", "backward", "backward_pre"]
ON_PARAMETER = ["grad", "post_accumulate_grad", "optimizer_step_pre"]


@pytest.mark.parametrize("kind", ON_MODULE + ON_PARAMETER)
def test_under_a_gradient_scaler_hooks_see_the_true_gradients(kind: str) -> None:
    """PyTorch's own hooks see 65536 for a gradient of 1."""
    both = with_and_without(GradScaler("cpu"), one_hook(selected(kind), kind))
    found, expected = (tensors(list(hooks.captures["h"][selected(kind)])) for hooks in both)
    assert found
    assert_close(found, expected)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("action", [{"action": "clamp", "max": 0.3}, {"action": "add_bias", "value": 0.1}])
@pytest.mark.parametrize("kind", ON_MODULE + ON_PARAMETER)
def test_an_edit_acts_on_the_true_gradient(kind: str, action: dict[str, Any], unscale: bool) -> None:
    scaler = GradScaler("cpu", init_scale=2.0**10)
    scaled, _ = with_and_without(scaler, one_hook(selected(kind), kind, **action), unscale=unscale)
    assert sum(scaled.fired.values()) == 1


def test_an_unchanged_gradient_is_the_same_object() -> None:
    scale = torch.tensor(1024.0)
    value = (torch.ones(2), torch.zeros(2))
    assert run_unscaled(lambda each: each, value, scale) is value
    new = run_unscaled(lambda each: (each[0], each[1] + 1), value, scale)
    assert new[0] is value[0]
    assert torch.equal(new[1], torch.full((2,), 1024.0))


def test_small_gradients_in_half_precision_are_not_lost() -> None:
    """The scaler's factor keeps them from underflowing; hooks see the unscaled gradients in 32 bits."""
    scaler = GradScaler("cpu", init_scale=2.0**14)
    model = net(torch.float16)
    spec = one_hook("2", "output_grad")
    with hookrun.compile(spec, model).install(model, scaler=scaler) as hooks:
        scaler.scale(model(X.half()).float().sum() * 1e-8).backward()
    assert_close(hooks.captures["h"]["2"][0], torch.full((4, 2), 1e-8), rtol=1e-2, atol=0)


def test_a_step_that_the_scaler_skips_does_not_count_as_a_step() -> None:
    scaler = GradScaler("cpu")
    model = net()
    before = copy.deepcopy(model)
    spec = {
        "pre": {"select": "**", "hook": "optimizer_step_pre", "action": "clip_norm", "max_norm": 0.1},
        "post": {"select": "2.weight", "hook": "optimizer_step_post", "action": "capture"},
    }
    with hookrun.compile(spec, model).install(model, scaler=scaler) as hooks:
        scaled_step(model, scaler, factor=float("inf"))
        assert set(hooks.fired.values()) == {0}
        assert hooks.clock.step == 0
        require_equal_weights(model, before)
        model.zero_grad()
        scaled_step(model, scaler)
        assert set(hooks.fired.values()) == {1}
        assert hooks.clock.step == 1


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
    "kind", ["grad", "output_grad", "post_accumulate_grad", "optimizer_step_pre", "optimizer_step_post"]
)
def test_hook_types_fire_per_micro_batch_or_per_step(kind: str, scaled: bool) -> None:
    scaler = GradScaler("cpu") if scaled else None
    hooks = accumulated(net(), one_hook(selected(kind), kind), 4, scaler)
    assert hooks.fired["h", selected(kind)] == 2 * (4 if kind in ("grad", "output_grad") else 1)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", ["post_accumulate_grad", "optimizer_step_pre"])
@pytest.mark.parametrize("action", [{"action": "scale", "factor": 0.5}, {"action": "clamp", "max": 0.2}])
def test_four_micro_batches_give_the_gradient_of_one_large_batch(
    kind: str, action: dict[str, Any], scaled: bool
) -> None:
    """With PyTorch's own hook, a scale of 0.5 on each of four micro-batches gives 0.94 of one gradient, not 2."""
    spec = one_hook("**", kind, **action)
    whole = net()
    parts = net()
    accumulated(whole, spec, 1)
    accumulated(parts, spec, 4, GradScaler("cpu") if scaled else None)
    require_equal_weights(parts, whole, rtol=1e-4, atol=1e-6)


def test_when_step_counts_optimizer_steps() -> None:
    spec = one_hook("2.weight", "grad", "print", when={"step": 1})
    hooks = accumulated(net(), spec, 4)
    assert [record["step"] for record in hooks.records] == [1] * 4


INPUT = torch.arange(12.0).reshape(4, 3)
CLIP = {"clip": {"select": "**", "hook": "optimizer_step_pre", "action": "clip_norm", "max_norm": 0.01}}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4),
}
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def closure_of(model: nn.Module, optimizer: Optimizer, clip: bool) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(INPUT).square().mean()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        return loss

    return closure


@each_optimizer
@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
def test_the_gradients_of_a_closure_are_clipped_as_by_hand(
    make: Callable[[Any], Optimizer], keyword: bool
) -> None:
    def trained(by_hand: bool) -> tuple[Tensor, list[float], Any]:
        model = linear()
        optimizer = make(model.parameters())
        closure = closure_of(model, optimizer, clip=by_hand)
        with hookrun.hooked(model, {} if by_hand else CLIP) as hooks:
            losses = [
                optimizer.step(closure=closure) if keyword else optimizer.step(closure) for _ in range(3)
            ]
        return model.weight.detach(), [float(loss.detach()) for loss in losses], hooks

    (expected, losses, _), (found, ours, hooks) = trained(by_hand=True), trained(by_hand=False)
    assert torch.equal(found, expected)
    assert ours == losses, "the closure's loss still reaches the optimizer and its caller"
    assert hooks.fired["clip", "weight"] >= 3


@each_optimizer
def test_gradients_from_before_the_closure_are_not_acted_on(make: Callable[[Any], Optimizer]) -> None:
    model = linear()
    optimizer = make(model.parameters())
    seen = {"seen": {"select": "weight", "hook": "optimizer_step_pre", "action": "capture"}}
    model.weight.grad = torch.full_like(model.weight, 1e6)
    with hookrun.hooked(model, seen) as hooks:
        optimizer.step(closure_of(model, optimizer, clip=False))
    for value in hooks.captures["seen"]["weight"]:
        assert value.abs().max() < 1e5


def test_a_closure_runs_with_gradients_even_under_no_grad() -> None:
    modes = list[bool]()
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> Tensor:
        modes.append(torch.is_grad_enabled())
        return closure_of(model, optimizer, clip=False)()

    with torch.no_grad(), hookrun.hooked(model, CLIP):
        optimizer.step(closure)
    assert modes == [True]


def test_torch_s_step_hooks_are_registered_once() -> None:
    before = dict(_global_optimizer_pre_hooks), dict(_global_optimizer_post_hooks)
    model = linear()
    with hookrun.hooked(model, CLIP), hookrun.hooked(model, CLIP):
        assert (dict(_global_optimizer_pre_hooks), dict(_global_optimizer_post_hooks)) == before
        model(INPUT).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_installing_does_not_break_a_step_elsewhere() -> None:
    model = linear()
    other = linear()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.0)
    other(INPUT).sum().backward()
    stop = threading.Event()
    errors = list[BaseException]()

    def step() -> None:
        try:
            while not stop.is_set():
                optimizer.step()
        except BaseException as error:  # the main thread reports it
            errors.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    try:
        for _ in range(300):
            with hookrun.hooked(model, CLIP):
                pass
    finally:
        stop.set()
        thread.join()
    assert errors == []


EVERY_SECOND = one_hook(when={"step": {"every": 2}})


@pytest.mark.parametrize("by_hand", [False, True])
def test_the_step_follows_the_optimizer_at_first(by_hand: bool) -> None:
    model = linear()
    seen = list[int]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hookrun.hooked(model, EVERY_SECOND) as hooks:
        for _ in range(8):
            seen.append(hooks.clock.step)
            model(INPUT).sum().backward()
            optimizer.step()
            if by_hand:
                hooks.step()
    assert seen == list(range(8))
    assert hooks.fired["h", ""] == 4


def test_the_first_of_two_optimizers_to_step_is_counted() -> None:
    model = nn.Sequential(linear(), nn.Linear(2, 2))
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    with hookrun.hooked(model, EVERY_SECOND) as hooks:
        for _ in range(3):
            model(INPUT).sum().backward()
            first.step()
            second.step()
    assert hooks.clock.step == 3


def test_a_post_hook_sees_the_step_that_it_ends() -> None:
    model = net()
    with hookrun.hooked(model, one_hook("2.weight", "optimizer_step_post", "print")) as hooks:
        for _ in range(3):
            scaled_step(model, None)
    assert [record["step"] for record in hooks.records] == [0, 1, 2]


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def selected(kind: str) -> str:
    return "2" if kind in ON_MODULE else "2.weight"


def scaled_step(
    model: nn.Module, scaler: GradScaler | None, factor: float = 1.0, *, unscale: bool = False
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(X).sum() * factor
    if scaler is None:
        loss.backward()
        optimizer.step()
        return
    scaler.scale(loss).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def with_and_without(scaler: GradScaler, spec: dict[str, Any], *, unscale: bool = False) -> tuple[Any, Any]:
    """A step with the scaler and one without, which must train the same; returns both installations."""
    installed = list[Any]()
    for given in (scaler, None):
        model = net()
        with hookrun.compile(spec, model).install(model, scaler=given) as hooks:
            scaled_step(model, given, unscale=unscale)
        installed.append(hooks)
    require_equal_weights(*(hooks._model for hooks in installed))
    return installed[0], installed[1]


def require_equal_weights(found: nn.Module, expected: nn.Module, **within: float) -> None:
    assert_close(found.state_dict(), expected.state_dict(), **within)


def tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [leaf for leaf in tree_leaves(value) if leaf is not None]
