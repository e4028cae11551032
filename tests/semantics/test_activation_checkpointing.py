"""Activation checkpointing recomputes calls in the backward pass: edits and noise repeat, records do not double."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import small_nets
import torch
from hooking import one_hook
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

import hookrun

MODES: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "without RNG state": {"use_reentrant": False, "preserve_rng_state": False},
}
Run = Callable[..., Any]


def plainly(function: Run, *args: Any) -> Any:
    """Call the function without checkpointing: the reference."""
    return function(*args)


def block() -> nn.Module:
    layers = {"inner": nn.Linear(6, 6), "act": nn.Tanh(), "outer": nn.Linear(6, 6)}
    return small_nets.Net(lambda m, x: x + m.outer(m.act(m.inner(x))), **layers)


class Net(nn.Module):
    """Three blocks, each in its own region; `shared` is called in every region, twice in the last one."""

    def __init__(self, run: Run = plainly) -> None:
        super().__init__()
        self.run = run
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.shared = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def region(self, number: int, x: Tensor) -> Tensor:
        x = self.shared(self.blocks[number](x))
        return self.shared(x.sigmoid()) if number == 2 else x

    def forward(self, x: Tensor) -> Tensor:
        for number in range(3):
            x = self.run(self.region, number, x)
        return self.head(x)


ROUNDED = {"rtol": 1e-4, "atol": 1e-6}
INPUT = torch.linspace(-1, 1, 24).reshape(4, 6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "hook",
    [
        {"hook": "forward", "action": "scale", "factor": 0.5},
        {"hook": "forward", "action": "clamp", "min": -0.2, "max": 0.2},
        {"hook": "forward", "action": "replace", "value": 0.3, "index": "..., 0"},
        {"hook": "forward", "action": "scale", "factor": 3, "index": "..., [1, 0]"},
        {"hook": "forward", "action": "capture", "index": "..., [1, 0]"},
        {"hook": "forward", "action": "noise", "std": 0.5},
        {"hook": "forward", "action": "noise", "std": 0.5, "when": {"probability": 0.5}},
        {"hook": "forward_pre", "action": "noise", "kind": "multiplicative", "std": 0.5},
        {"hook": "forward", "action": "scale", "factor": 3, "when": {"probability": 0.5}},
        {"hook": "forward", "action": "scale", "factor": 3, "when": {"call": 2}},
        {"hook": "forward", "action": "scale", "factor": 3, "when": {"call": [0, 3], "step": {"start": 1}}},
        {"hook": "forward_pre", "action": "add_bias", "value": 1},
        {"hook": "forward", "action": "add_bias", "value": 1, "trainable": True},
        {"hook": "output_grad", "action": "clamp", "min": -0.1, "max": 0.1},
        {"hook": "backward", "action": "scale", "factor": 2},
        {"hook": "backward_pre", "action": "scale", "factor": 2},
        {"hook": "saved_tensors", "action": "offload", "to": "cpu"},
        *(
            {"select": "blocks", "hook": hook, "action": "clamp", "min": -0.01, "max": 0.01}
            for hook in ("grad", "post_accumulate_grad", "optimizer_step_pre", "optimizer_step_post")
        ),
    ],
)
def test_gradients_equal_those_without_checkpointing(mode: str, hook: dict[str, Any]) -> None:
    hooks = {"h": {"select": ["**.inner", "shared", "blocks.1"], **hook}}
    with_checkpoints, _ = compared(nets(checkpointed(mode)), hooks)
    assert any(with_checkpoints.fired.values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["forward_pre", "forward", "output_grad", "backward", "backward_pre"])
@pytest.mark.parametrize("action", ["capture", "stats", "print", "check"])
def test_a_recomputed_call_is_recorded_once(
    mode: str, kind: str, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = {"policy": "warn", "max": 0.1} if action == "check" else {}
    hooks = one_hook(["blocks.*", "**.act", "shared", "head"], kind, action, **extra)
    with_checkpoints, without = compared(nets(checkpointed(mode)), hooks)
    assert_same(seen(with_checkpoints, "h"), seen(without, "h"))
    assert_same(in_order(with_checkpoints.records), in_order(without.records))


NOISE = one_hook(["**.inner", "shared"], "forward", "noise", std=0.5)


class Nested(Net):
    """The three regions are inside an outer region."""

    around: Run = staticmethod(plainly)

    def forward(self, x: Tensor) -> Tensor:
        return self.around(super().forward, self.around(self.shared, x))


# from the inner region, in the first run
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("inner", MODES)
@pytest.mark.parametrize("outer", MODES)
def test_nested_regions_give_the_results_without_checkpointing(outer: str, inner: str) -> None:
    torch.manual_seed(0)
    plain = Nested()
    other = Nested(checkpointed(inner))
    other.load_state_dict(plain.state_dict())
    other.around = checkpointed(outer)
    hooks = NOISE | {"seen": {"select": ["**.act", "shared"], "hook": "forward", "action": "capture"}}
    with_checkpoints, without = compared((plain, other), hooks)
    assert_same(seen(with_checkpoints, "seen"), seen(without, "seen"))


@pytest.mark.parametrize("mode", MODES)
def test_checkpointing_the_whole_model_changes_nothing(mode: str) -> None:
    once = {"select": "shared", "hook": "forward", "action": "capture", "when": {"call": 3}}
    runs = iter((plainly, checkpointed(mode)))

    def trained(net: nn.Module) -> None:
        run = next(runs)
        for _ in range(2):
            run(net, INPUT.clone().requires_grad_()).sum().backward()

    require_same(nets(plainly), NOISE | {"once": once}, trained)


TWICE_THROUGH_ONE = ("not reentrant", (0, 0))  # of the retained graph
ORDERS = [(mode, order) for mode in MODES for order in ((0, 1), (1, 0))]


@pytest.mark.parametrize(("mode", "order"), [*ORDERS, TWICE_THROUGH_ONE])
def test_each_backward_pass_recomputes_the_calls_of_its_forward(mode: str, order: tuple[int, int]) -> None:
    def trained(net: nn.Module) -> None:
        losses = [net(INPUT.clone().requires_grad_()).square().sum() for _ in range(2)]
        for number in order:
            losses[number].backward(retain_graph=order == (0, 0))

    require_same(nets(checkpointed(mode)), NOISE, trained)


@pytest.mark.parametrize("early_stop", [True, False])
def test_recomputation_may_stop_early_inside_an_action(early_stop: bool) -> None:
    """An action may save the last tensor of a region; torch then ends the recomputation by an exception inside it."""
    hooks = one_hook("1", "forward", "scale", factor=[2.0, 3.0])
    net = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    x = torch.ones(3, 2, requires_grad=True)
    with hookrun.hooked(net, hooks), set_checkpoint_early_stop(early_stop):
        checkpoint(net, x, use_reentrant=False).square().sum().backward()
    with torch.no_grad():
        factor = torch.tensor([2.0, 3.0])
        expected = (2 * net[0](x) * factor * factor) @ net[0].weight
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_sequential_changes_nothing(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
    other = copy.deepcopy(plain)
    hooks = {
        "noise": {"select": "*.0", "hook": "forward", "action": "noise"},
        "seen": {"select": "*", "hook": "forward", "action": "capture"},  # the root is not called
    }

    def trained(net: nn.Module) -> None:
        x = INPUT.clone().requires_grad_()
        y = net(x) if net is plain else checkpoint_sequential(net, 2, x, use_reentrant=use_reentrant)
        y.sum().backward()

    require_same((plain, other), hooks, trained)


def test_a_custom_backward_is_not_a_recomputation() -> None:
    layer = nn.Linear(2, 2)

    class Implicit(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return layer(grad)  # type: ignore[no-any-return]

    hooks = {"seen": {"select": "", "hook": "forward", "action": "capture"}}
    with hookrun.hooked(layer, hooks) as installed:
        Implicit.apply(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert_same(installed.captures["seen"][""], [layer(torch.ones(1, 2)).detach()])
    assert installed.fired["seen", ""] == 1


def test_saved_bytes_are_counted_once() -> None:
    plain, other = nets(checkpointed("not reentrant"))
    hooks = one_hook("blocks.0.outer", "saved_tensors", "stats", of=["bytes"])
    _, without = trained(plain, hooks, steps=1)
    _, with_checkpoints = trained(other, hooks, steps=1)
    assert_same(in_order(with_checkpoints.records), in_order(without.records))
    assert without.records


def seen(installed: Any, hook: str) -> dict[str, list[Any]]:
    """Module -> what the hook has captured there; empty for a hook that captures nothing."""
    return {path: list(kept) for path, kept in installed.captures.get(hook, {}).items()}


def in_order(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    keys = ("hook", "module", "step", "call", "path")
    return sorted(records, key=lambda record: [str(record[key]) for key in keys])


def assert_same(found: Any, expected: Any) -> None:
    """Assert that two values are equal, tensors and floats within rounding."""
    (ours, of_ours), (theirs, of_theirs) = tree_flatten(found), tree_flatten(expected)
    assert of_ours == of_theirs
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(other, Tensor | float):
            torch.testing.assert_close(one, other, **({} if isinstance(other, Tensor) else ROUNDED))
        else:
            assert one == other


def checkpointed(mode: str) -> Run:
    return lambda function, *args: checkpoint(function, *args, **MODES[mode])


def nets(run: Run) -> tuple[Net, Net]:
    """The same network without and with checkpointing."""
    torch.manual_seed(0)
    plain = Net()
    other = copy.deepcopy(plain)
    other.run = run
    return plain, other


def trained(net: nn.Module, hooks: dict[str, Any], steps: int = 3) -> tuple[list[Tensor], Any]:
    """Train some steps; returns the gradients of each step, and the installation."""
    gradients = list[Tensor]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with hookrun.hooked(net, hooks) as installed:
        for _ in range(steps):
            x = INPUT.clone().requires_grad_()
            optimizer.zero_grad()
            net(x).square().sum().backward()
            gradients += [x.grad, *(p.grad.clone() for p in net.parameters())]  # type: ignore[union-attr]
            optimizer.step()
            installed.step()
        _ = installed.records
    return gradients, installed


def compared(pair: tuple[nn.Module, nn.Module], hooks: dict[str, Any]) -> tuple[Any, Any]:
    """Assert that both have the same gradients and firings; returns the installation with and without checkpoints."""
    (expected, without), (found, with_checkpoints) = (trained(net, hooks) for net in pair)
    assert_same(found, expected)
    assert with_checkpoints.fired == without.fired
    return with_checkpoints, without


def require_same(
    pair: tuple[nn.Module, nn.Module], hooks: dict[str, Any], run: Callable[[nn.Module], None]
) -> None:
    """Assert that a run of both under the hooks has the same firings, captures and gradients."""
    results = list[Any]()
    for net in pair:
        with hookrun.hooked(net, hooks) as installed:
            run(net)
        captures = {name: seen(installed, name) for name in hooks}
        results.append((dict(installed.fired), captures, [p.grad for p in net.parameters()]))
    assert_same(results[1], results[0])
