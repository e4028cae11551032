"""`{hook: NAME, module: PATH}` is what hand-written path patching passes on from one hook to a later one."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from draws import normal
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookrun
from hookrun.engine.plan.plan import uncompilable
from hookrun.errors import CompileError, HookError, SpecError

INPUT = normal(5, 4)
CAPTURE = {"select": "first", "hook": "forward", "action": "capture"}


class Net(nn.Module):
    """Three layers; `third` runs last, and `again` how often the second one runs."""

    def __init__(self, again: int = 1) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.relu, self.again = nn.ReLU(inplace=True), again

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.first(x))
        for _ in range(self.again):
            x = self.second(x)
        return self.third(x)


def test_values_are_those_of_hand_written_patching() -> None:
    net = Net()
    expected, expected_grads = by_hand(net, INPUT)
    plan = hookrun.compile(hooks(), net, example=((INPUT,), {}))
    with plan.install(net) as installed:
        for x in (INPUT, normal(5, 4, seed=3), INPUT):
            output = net(x)
        assert torch.equal(output, expected)
        assert all(map(torch.equal, gradients(net, output), expected_grads))
        assert len(installed.captures["c"]["first"]) == 3
    assert "value=c at its module in this forward" in str(plan)


@pytest.mark.parametrize(
    ("source", "keys"),
    [
        ({"index": ":, 1"}, {"index": ":, 2"}),
        ({"hook": "forward_pre"}, {"hook": "forward_pre", "action": "add_bias"}),
        ({"keep": {"every": 2}, "reduce": "mean"}, {}),
        ({"select": ["first", "third"]}, {"value": {"hook": "c", "module": "first"}}),
        ({"when": {"step": 0}}, {"when": {"step": 0, "mode": "train"}}),
    ],
)
def test_parts_take_the_value_whatever_is_stored(source: Any, keys: Any) -> None:
    net = Net()
    given = hooks({**CAPTURE, **source}, **keys)
    given["after"] = {"select": "second", "hook": given["patch"]["hook"], "action": "capture"}
    with hookrun.hooked(net, given) as installed:
        installed.samples = torch.arange(5)
        net(INPUT)
        (seen,) = installed.captures["after"]["second"]
    first = net.first(INPUT)
    before = net.relu(first.clone())
    if keys.get("hook") == "forward_pre":
        torch.testing.assert_close(seen, before + INPUT)
    elif "index" in keys:
        second = net.second(before)
        second[:, 2] = first[:, 1]
        torch.testing.assert_close(seen, second.detach())
    else:
        torch.testing.assert_close(seen, first.detach())


class Reader(nn.Module):
    """Reads tokens, without a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.second(self.first(input_ids))

    def generate(self, input_ids: Tensor) -> list[Tensor]:
        tokens = torch.tensor([[5, 6, 7, 8]])
        return [self(input_ids), *(self(torch.cat([input_ids, tokens[:, :new]], 1)) for new in (1, 2))]


def test_recomputed_tokens_are_passed_on_again() -> None:
    net = Reader()
    part = {"tokens": {"phase": "generation"}}
    last = net.generate(torch.tensor([[1, 2, 3]]))[-1]
    with hookrun.hooked(net, hooks({**CAPTURE, **part}, **part)) as installed:
        output = net.generate(torch.tensor([[1, 2, 3]]))[-1]
    assert torch.equal(output[:, :3], last[:, :3])
    assert torch.equal(output[:, 3:], net.first(torch.tensor([[5, 6]])))
    assert [len(rows) for rows in installed.captures["c"]["first"]] == [1, 1], "each token is stored once"


def test_an_earlier_pass_never_counts() -> None:
    net = Net(again=3)
    both = list[Tensor]()
    source = {**CAPTURE, "select": "second"}
    with hookrun.hooked(net, hooks(source, select="third")):
        both.append(net(INPUT))
        net.again = 0
        with pytest.raises(HookError, match=r"'patch'.*c has not fired at second in this forward"):
            net(INPUT)
        net.again = 3
        with pytest.raises(HookError, match="has not fired"):
            net.third(INPUT)  # not within a forward of the model
        both.append(net(INPUT))
    x = net.relu(net.first(INPUT))
    assert torch.equal(*both)
    assert torch.equal(both[0], net.second(net.second(net.second(x))))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_pass_that_was_broken_off_leaves_nothing(error: type[BaseException]) -> None:
    net = Net()

    def broken(*call: Any) -> None:
        raise error

    with hookrun.hooked(net, hooks()):
        handle = net.relu.register_forward_hook(broken)
        with pytest.raises(error):
            net(INPUT)
        handle.remove()
        with pytest.raises(HookError, match="has not fired"):
            net.second(INPUT)


def test_the_values_are_dropped_when_the_forward_ends() -> None:
    net = Net()
    kept = list[weakref.ref[Tensor]]()
    with hookrun.hooked(net, hooks(action="add_bias")) as installed:
        net.third.register_forward_hook(
            lambda *call: kept.extend(map(weakref.ref, installed.clock.calls.forward.passed_on.values()))
        )
        with torch.no_grad():
            net(INPUT)
        gc.collect()
        assert [ref() for ref in kept] == [None]


def test_threads_have_their_own_values() -> None:
    net = Net()
    outputs = dict[int, Tensor]()
    inputs = [normal(5, 4, seed=seed) for seed in range(3)]
    meet = threading.Barrier(3)
    expected = [by_hand(net, x)[0] for x in inputs]

    def wait(*call: Any) -> None:
        meet.wait(60)

    net.relu.register_forward_hook(wait)

    def run(number: int) -> None:
        outputs[number] = net(inputs[number])

    with hookrun.hooked(net, hooks()):
        threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert all(torch.equal(outputs[number], expected[number]) for number in range(3))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"value": {"hook": "d"}}, "there is no capture 'd'"),
        ({"value": {"hook": "patch"}}, "there is no capture 'patch'"),
        ({"value": {"hook": "c", "module": "relu"}}, "c captures first: name one"),
        ({"source": {"select": ["first", "relu"]}}, "c captures first, relu: name one"),
        ({"source": {"select": "third"}}, "c has not fired at third"),
        ({"source": {"hook": "output_grad"}}, "on forward or forward_pre"),
        ({"hook": "output_grad"}, "on forward or forward_pre"),
        ({"action": "add_bias", "trainable": True}, "not for parameters"),
        ({"source": {"when": {"mode": "train"}}}, r"\(train\): give both"),
        ({"source": {"when": {"value": {"of": "norm", "above": 1}}}}, "give both"),
        ({"source": {"when": {"step": [1]}}, "when": {"step": [2]}}, "give both"),
        ({"source": {"index": "0:2"}}, "does not broadcast"),
        ({"value": {"hook": "c", "path": "x"}}, "unknown key"),
        ({"source": {"enabled": False}}, "there is no capture 'c'"),
    ],
)
def test_a_value_that_cannot_be_there_is_refused_beforehand(changed: dict[str, Any], text: str) -> None:
    source = {**CAPTURE, **changed.pop("source", {})}
    with pytest.raises((SpecError, CompileError), match=text):
        hookrun.compile(hooks(source, **changed), Net(), example=((INPUT,), {}))


class Checkpointed(Net):
    def __init__(self, inside: str, reentrant: bool) -> None:
        super().__init__()
        self.inside, self.reentrant = inside, reentrant

    def forward(self, x: Tensor) -> Tensor:
        for name in ("first", "second"):
            module = getattr(self, name)
            x = checkpoint(module, x, use_reentrant=self.reentrant) if name == self.inside else module(x)
        return x


@pytest.mark.filterwarnings("ignore::hookrun.HookrunWarning")  # the pass ends before the second hook
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", ["first", "second"])
def test_activation_checkpointing_is_refused(inside: str, reentrant: bool) -> None:
    net = Checkpointed(inside, reentrant)
    with hookrun.hooked(net, hooks()), pytest.raises(HookError, match="activation checkpointing"):
        net(INPUT.clone().requires_grad_())


def test_a_graph_refuses_the_capture() -> None:
    plan = hookrun.compile(hooks(), Net(), example=((INPUT,), {}))
    assert [problem.where for problem in uncompilable(plan)] == ["hooks.c"]


def hooks(source: Any = CAPTURE, value: Any = None, **keys: Any) -> dict[str, Any]:
    value = {"hook": "c"} if value is None else value
    patch = {"select": "second", "hook": "forward", "action": "replace", "value": value, **keys}
    return {"c": source, "patch": patch}


def by_hand(net: Net, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The output and the gradients when the output of `first` replaces that of `second`."""
    kept = list[Tensor]()
    handles = [
        net.first.register_forward_hook(lambda module, args, output: kept.append(output.clone())),
        net.second.register_forward_hook(lambda module, args, output: kept[-1]),
    ]
    output = net(x)
    for handle in handles:
        handle.remove()
    return output, gradients(net, output)


def gradients(net: Net, output: Tensor) -> list[Tensor]:
    asked = [*net.first.parameters(), *net.third.parameters()]
    return list(torch.autograd.grad(output.square().sum(), asked))
