"""Optimizer hooks act on the gradients that the optimizer uses, from a loop or a closure, in any thread."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import hookrun

X = torch.arange(12.0).reshape(4, 3)
CLIP = {"clip": {"select": "**", "hook": "optimizer_step_pre", "action": "clip_norm", "max_norm": 0.01}}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4),
}
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def closure_of(model: nn.Module, optimizer: Optimizer, clip: bool) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(X).square().mean()
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
    def trained(by_hand: bool) -> tuple[Tensor, list[float]]:
        model = net()
        optimizer = make(model.parameters())
        closure, losses = closure_of(model, optimizer, clip=by_hand), []
        for _ in range(3):
            loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
            losses.append(float(loss.detach()))
        return model.weight.detach().clone(), losses

    expected = trained(by_hand=True)
    model = net()
    optimizer, losses = make(model.parameters()), []
    with hookrun.hooked(model, CLIP) as hooks:
        closure = closure_of(model, optimizer, clip=False)
        for _ in range(3):
            loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
            losses.append(float(loss.detach()))
    assert torch.equal(model.weight, expected[0])
    assert losses == expected[1], "the closure's loss still reaches the optimizer and its caller"
    assert hooks.fired["clip", "weight"] >= 3


@each_optimizer
def test_gradients_from_before_the_closure_are_not_acted_on(make: Callable[[Any], Optimizer]) -> None:
    model = net()
    optimizer = make(model.parameters())
    seen = {"seen": {"select": "weight", "hook": "optimizer_step_pre", "action": "capture"}}
    model.weight.grad = torch.full_like(model.weight, 1e6)
    with hookrun.hooked(model, seen) as hooks:
        optimizer.step(closure_of(model, optimizer, clip=False))
    assert all(value.abs().max() < 1e5 for value in hooks.captures["seen"]["weight"])


def test_a_closure_runs_with_gradients_even_under_no_grad() -> None:
    modes = []
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> Tensor:
        modes.append(torch.is_grad_enabled())
        return closure_of(model, optimizer, clip=False)()

    with torch.no_grad(), hookrun.hooked(model, CLIP):
        optimizer.step(closure)
    assert modes == [True]


def test_torchs_global_step_hooks_are_registered_once_per_process() -> None:
    before = dict(_global_optimizer_pre_hooks), dict(_global_optimizer_post_hooks)
    model = net()
    with hookrun.hooked(model, CLIP), hookrun.hooked(model, CLIP):
        assert (dict(_global_optimizer_pre_hooks), dict(_global_optimizer_post_hooks)) == before
        model(X).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_installing_in_one_thread_does_not_break_a_step_in_another() -> None:
    model, other = net(), net()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.0)
    other(X).sum().backward()
    stop, errors = threading.Event(), list[BaseException]()

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


def test_nothing_is_kept_alive_after_the_block() -> None:
    model = net()
    with hookrun.hooked(model, CLIP):
        model(X).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    dead = weakref.ref(model)
    del model
    gc.collect()
    assert dead() is None


class TestStepInAUsersOwnLoop:
    EVERY_SECOND = {
        "h": {"select": "", "hook": "forward", "action": "capture", "when": {"step": {"every": 2}}}
    }

    @staticmethod
    def loop(hooks: Any, model: nn.Module, optimizer: Optimizer, steps: int, by_hand: bool) -> list[int]:
        seen = []
        for _ in range(steps):
            seen.append(hooks.clock.step)
            model(X).sum().backward()
            optimizer.step()
            if by_hand:
                hooks.step()
        return seen

    def test_the_step_follows_the_optimizer(self) -> None:
        model = net()
        with hookrun.hooked(model, self.EVERY_SECOND) as hooks:
            seen = self.loop(hooks, model, torch.optim.SGD(model.parameters(), lr=0.1), 8, by_hand=False)
        assert seen == list(range(8))
        assert hooks.fired["h", ""] == 4

    def test_hooks_step_takes_over_without_counting_twice(self) -> None:
        model = net()
        with hookrun.hooked(model, self.EVERY_SECOND) as hooks:
            seen = self.loop(hooks, model, torch.optim.SGD(model.parameters(), lr=0.1), 8, by_hand=True)
        assert seen == list(range(8))

    def test_the_first_of_two_optimizers_to_step_is_counted(self) -> None:
        model = nn.Sequential(net(), net().requires_grad_())
        model[1] = nn.Linear(2, 2)
        first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
        with hookrun.hooked(model, self.EVERY_SECOND) as hooks:
            for _ in range(3):
                model(X).sum().backward()
                first.step()
                second.step()
        assert hooks.clock.step == 3

    def test_the_optimizer_of_another_model_is_not_counted(self) -> None:
        model, other = net(), net()
        with hookrun.hooked(model, self.EVERY_SECOND) as hooks:
            model(X)
            other(X).sum().backward()
            torch.optim.SGD(other.parameters(), lr=0.1).step()
        assert hooks.clock.step == 0

    def test_a_post_hook_sees_the_step_that_it_ends(self) -> None:
        model = net()
        spec = {"h": {"select": "weight", "hook": "optimizer_step_post", "action": "print"}}
        with hookrun.hooked(model, spec) as hooks:
            self.loop(hooks, model, torch.optim.SGD(model.parameters(), lr=0.1), 3, by_hand=False)
        assert [record["step"] for record in hooks.records] == [0, 1, 2]

    def test_a_step_that_the_scaler_skips_does_not_count(self) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        with hookrun.hooked(model, self.EVERY_SECOND, scaler=scaler) as hooks:
            for factor in (1.0, float("inf"), 1.0):
                optimizer.zero_grad()
                scaler.scale(model(X).sum() * factor).backward()
                scaler.step(optimizer)
                scaler.update()
        assert hooks.clock.step == 2
