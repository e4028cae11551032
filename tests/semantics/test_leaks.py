"""No leaks: after hundreds of installations the model is freed without the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from hooking import EVERY, one_hook
from torch import Tensor, nn

import hookrun
from hookrun.engine.runtime.hooks.base import RegisteredHook
from hookrun.engine.runtime.site import HookSite

X = torch.ones(2, 3)
KINDS = EVERY | {
    "call": {"select": "0", "hook": "forward", "action": "scale", "factor": 2, "when": {"call": 0}},
    "fill": {"select": "0", "hook": "apply", "action": "fill", "value": 1},
}


@pytest.fixture(scope="module", autouse=True)
def _freeze_existing_objects() -> None:
    """Freeze the objects that exist already, so that the collector does not traverse them before each test."""
    step(net())  # torch creates some objects only once
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [*KINDS, "all"])
def test_hundreds_of_installations_leave_the_model_collectable(kind: str) -> None:
    model = net()
    spec = KINDS if kind == "all" else {kind: KINDS[kind]}
    plan = hookrun.compile(spec, model)
    before = alive(RegisteredHook), alive(HookSite)
    cycles = 200 if kind == "all" else 50
    for number in range(cycles):
        with plan.install(model) as hooks:
            if number % 50 == 0:
                step(model)
    gone = weakref.ref(hooks), weakref.ref(model)
    del hooks
    assert gone[0]() is None
    assert (alive(RegisteredHook), alive(HookSite)) == before
    del model, plan
    assert gone[1]() is None


def test_no_single_action_keeps_the_model_alive(alone: dict[str, Any]) -> None:
    """A hook alone refers to more objects: with another one that cannot be compiled no traced version is made."""
    assert left({"h": {"select": "0", **alone}}, times=2) == []


@pytest.mark.parametrize(
    "when",
    [{"step": {"every": 2}}, {"epoch": [0]}, {"call": 0}, {"mode": "train"}, {"probability": 0.5}],
    ids=str,
)
def test_no_schedule_keeps_the_model_alive(when: dict[str, Any]) -> None:
    assert left(one_hook("0", "forward", "scale", factor=2, when=when)) == []


@pytest.mark.parametrize("kind", ["forward", "backward", "output_grad", "forward_pre"])
def test_an_exception_does_not_keep_the_model_alive(kind: str) -> None:
    failing = {"select": "2", "hook": kind, "action": "check", "max": -1e9}
    assert left({**KINDS, "failing": failing}, times=20) == []


def test_captures_are_freed_with_the_installation() -> None:
    model = net()
    with hookrun.hooked(model, one_hook("0")) as hooks:
        model(X)
    kept = weakref.ref(hooks.captures["h"]["0"][0])
    assert kept() is not None
    del hooks
    assert kept() is None


def test_a_captured_value_does_not_keep_the_graph() -> None:
    model = net()
    alive_inputs = list[weakref.ref[Tensor]]()
    with hookrun.hooked(model, one_hook("2")) as hooks:
        for _ in range(3):
            x = X.clone().requires_grad_()
            alive_inputs.append(weakref.ref(x))
            output = model(x)
            del x, output
        assert [each() for each in alive_inputs] == [None] * 3
    assert len(hooks.captures["h"]["2"]) == 3
    for tensor in hooks.captures["h"]["2"]:
        assert not tensor.requires_grad


def test_a_compiled_plan_does_not_keep_the_model() -> None:
    model = net()
    plan = hookrun.compile(KINDS, model, example=((X,), {}))
    gone = weakref.ref(model)
    del model
    gc.collect()  # in a trial run with fake tensors torch itself leaves reference cycles
    assert gone() is None
    assert len(plan.hooks) == len(KINDS)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))


def step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output = model(X.clone().requires_grad_() * 1)
    if output is not None:  # no hook stops the forward
        output.sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def left(spec: dict[str, Any], times: int = 1) -> list[str]:
    """What is still there after the model has trained in installations: "hooks", "model" or neither."""
    model = net()
    plan = hookrun.compile(spec, model)
    for _ in range(times):
        with suppress(hookrun.CheckFailed), plan.install(model) as hooks:
            step(model)
    gone = {"hooks": weakref.ref(hooks), "model": weakref.ref(model)}
    del hooks, model, plan
    return [name for name, there in gone.items() if there() is not None]


def alive(kind: type) -> int:
    return sum(issubclass(type(each), kind) for each in gc.get_objects())
