"""Where values first become non-finite in a step: the module, hook or backward function is named that made them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookrun
from hookrun.errors import HookError
from hookrun.runtime import Installation
from hookrun.tasks.loop.watch import Origin, Watch

Step = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Layers that double, cut off below 0 and normalize, called as `step` says."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.first, self.relu, self.soft, self.step = nn.Linear(3, 3), nn.ReLU(), nn.Softmax(-1), step
        self.first.weight.data, self.first.bias.data = 2 * torch.eye(3), torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self, x)


def watched(
    step: Step, x: Tensor | None = None, inner: nn.Module | None = None, **hook: Any
) -> tuple[Origin | None, Origin | None]:
    """The first origins in the forward and in the backward pass of one step, under a hook or none."""
    model = Net(step)
    model.inner = inner
    watch = Watch(model)
    with Installation(hookrun.compile({"h": hook} if hook else {}, model), model, sink=watch):
        with watch.forward():
            output = model(torch.tensor([[1.0, 2.0, -3.0]]) if x is None else x)
        loss = output.square().sum()
        watch.follow_backward(loss, "the loss")
        loss.backward()
    watch.remove()
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    return watch.first(), watch.first_of_backward()


def text(origin: Origin | None) -> str:
    return "" if origin is None else origin.text


ROOT = "first made by the forward of (root) (Net), call 0, itself"
FIRST = "first made by the forward of first (Linear), call"


@pytest.mark.cases("step, named", [
    (lambda net, x: net.first(x), ""),
    (lambda net, x: net.relu(net.first(x * 0 - 1).log()), f"{ROOT}, before it calls relu: 3 NaN of 3 elements"),
    (lambda net, x: net.relu(net.first(x)) / 0, f"{ROOT}, outside its submodules, from finite inputs: 1 NaN and 2"),
    (lambda net, x: net.soft(net.first(x * 0) / 0).sum() + net.relu(x * torch.inf), f"{ROOT}, before it calls soft"),
    (lambda net, x: net.first(x * 1e38), ""),
    (lambda net, x: net.soft(net.first(x * 3e38)), f"{FIRST} 0, from finite inputs: 2 infinite of 3 elements"),
    (lambda net, x: net.first(net.relu(net.first(x * 1e38))), f"{FIRST} 1, from finite inputs"),
])  # fmt: skip
def test_the_call_that_makes_them_is_named_and_those_that_pass_them_on_are_not(
    step: Step, named: str
) -> None:
    found, _ = watched(step, torch.tensor([[1.0, 1.0, -0.1]]))
    assert text(found).startswith(named) and bool(named) == (found is not None)


def test_values_that_become_finite_again_are_not_to_blame() -> None:
    mask = torch.tensor([0.0, -torch.inf, 0.0])
    found, _ = watched(lambda net, x: net.relu(net.soft(net.first(x) + mask)) / 0)
    assert text(found).startswith(f"{ROOT}, outside its submodules")
    masked, _ = watched(lambda net, x: net.soft(net.first(x) + mask))
    assert masked is not None and masked.healed, "with nothing else to blame it is told"
    inner = Net(lambda net, x: net.relu(net.first(x) / 0).nan_to_num(0.0, 0.0, 0.0))
    found, _ = watched(lambda net, x: net.relu(net.inner(x)) / 0, inner=inner)
    assert text(found).startswith(f"{ROOT}, outside its submodules")


def test_inputs_of_the_model_are_told_apart() -> None:
    found, _ = watched(lambda net, x: net.relu(net.first(x)), torch.tensor([[1.0, torch.nan, 0.0]]))
    assert found is not None and found.is_input and found.text == "1 NaN of 3 elements"


@pytest.mark.cases("kind, select, on", [
    ("forward", "relu", "relu, call 1"), ("forward_pre", "first", "first, call 0"),
    ("output_grad", "relu", "relu, call 1"), ("grad", "first.bias", "first.bias"),
])  # fmt: skip
def test_a_hook_is_named_with_its_call(kind: str, select: str, on: str) -> None:
    hook = {"hook": kind, "select": select, "action": "scale", "factor": 1e39}
    when = {"when": {"call": 1}} if select == "relu" else {}
    forward, backward = watched(lambda net, x: net.relu(net.relu(net.first(x))), **hook, **when)
    expected = f"first made by hook 'h' ({kind}, scale) on {on}, from finite values: "
    if kind.startswith("forward"):
        assert text(forward).startswith(expected)
    else:
        assert forward is None and text(backward).startswith(expected)


def test_a_hook_that_makes_them_finite_again_heals_them_and_one_that_raises_does_so_here_too() -> None:
    clamp = {"hook": "forward", "select": "first", "action": "clamp", "min": 0.0, "max": 9.0}
    found, _ = watched(lambda net, x: net.relu(net.first(x * 1e38)) / 0, **clamp)
    assert text(found).startswith(f"{ROOT}, outside its submodules")
    found, _ = watched(lambda net, x: net.first(x / 0), **{**clamp, "hook": "forward_pre", "max": 3e38})
    assert text(found).startswith(f"{FIRST} 0, from finite inputs")
    with pytest.raises(HookError, match="on relu: it is said"):
        Watch(Net(lambda net, x: x)).fail(type("Site", (), {"where": "on relu"})(), "it is said")  # type: ignore[arg-type]


@pytest.mark.cases("step, named", [
    (lambda net, x: net.relu(net.first(x)).sqrt(), "(root) (Net), call 0 (SqrtBackward0)"),
    (lambda net, x: net.first(x)[:, :2].sum() + net.relu(x).detach().sum(), ""),
])  # fmt: skip
def test_the_backward_function_is_named_with_the_innermost_call_that_made_it(step: Step, named: str) -> None:
    forward, backward = watched(step)
    assert forward is None
    assert text(backward).startswith(f"first made by the backward of {named}" if named else "")
    assert bool(named) == (backward is not None)
    _, backward = watched(
        lambda net, x: net.inner(x) + 1, inner=Net(lambda net, x: net.first(x).relu().sqrt())
    )
    assert "inner (Net), call 0 (SqrtBackward0)" in text(backward)


def test_a_function_outside_every_module_is_the_loss_s() -> None:
    model = Net(lambda net, x: net.relu(net.first(x)))
    watch = Watch(model)
    with watch.forward():
        output = model(torch.zeros(1, 3))
    loss = output.sqrt().sum()
    watch.follow_backward(loss, "the loss mine")
    loss.backward()
    assert "the backward of the loss mine (SqrtBackward0)" in text(watch.first_of_backward())


def test_a_call_that_ends_by_an_exception_is_no_part_of_the_calls_after_it() -> None:
    """The model may catch it; or the pass ends, and another one begins."""

    def fails(net: Net, x: Tensor) -> Tensor:
        try:
            net.first(x[:, :2])
        except RuntimeError:
            return net.relu(x) / 0
        raise AssertionError

    found, _ = watched(fails, torch.ones(1, 3, requires_grad=True))
    assert text(found).startswith(f"{ROOT}, outside its submodules")
    model = Net(lambda net, x: net.first(x))
    watch = Watch(model)
    with pytest.raises(RuntimeError, match="shapes"), watch.forward():
        model(torch.ones(1, 2))
    with watch.forward():
        model(torch.full((1, 3), torch.nan))
    assert watch.first() is not None and watch.first().is_input


class Gate(nn.Module):
    """Says that it has begun, and ends when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_end = Event(), Event()

    def forward(self, x: Tensor) -> Tensor:
        self.begun.set()
        assert self.may_end.wait(10)
        return x


def test_modules_that_overlap_in_several_threads_do_not_hide_the_origin() -> None:
    gates = nn.ModuleList([Gate(), Gate()])

    def step(net: Net, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            ends = list[Future[Tensor]]()
            for gate in gates:
                ends.append(pool.submit(gate, x))
                assert gate.begun.wait(10)
            for gate, end in zip(gates, ends, strict=True):  # the first to begin ends first
                gate.may_end.set()
                end.result(10)
        return net.first(x.log())

    assert text(watched(step, inner=gates)[0]).startswith(ROOT)


def test_a_new_pass_forgets_the_forward_of_the_last_one() -> None:
    model = Net(lambda net, x: net.relu(x) / 0)
    watch = Watch(model)
    for x in (torch.ones(1, 3), None):
        with watch.forward():
            if x is not None:
                model(x)
        assert (watch.first() is None) == (x is None)
    model(torch.ones(1, 3))
    assert watch.first() is None, "outside a pass nothing is watched"
