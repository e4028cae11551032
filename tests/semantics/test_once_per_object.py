"""A module object is hooked once and fires at each call; the state of a call belongs to that call."""

from __future__ import annotations

import json
import random
import threading
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hooking import one_hook
from small_nets import Net
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import hookrun


@pytest.mark.parametrize("part", range(4))
def test_in_random_trees_each_module_object_is_hooked_once(part: int) -> None:
    for seed in range(part * 50, part * 50 + 50):
        model = random_tree(seed)
        select = ["**", "**.{a,b}*", "type:Block", "type:Tanh"][seed % 4]
        names = dict(model.named_modules(remove_duplicate=False))
        calls = calls_by_hand(model)
        plan = hookrun.compile(one_hook(select, expect=">=0"), model)
        (hook,) = plan.hooks
        objects = [id(names[target.path]) for target in hook.matches]
        assert len(objects) == len(set(objects)), "each object once"
        with plan.install(model) as hooks:
            model(torch.ones(1, 2))
        for target in hook.matches:
            same = [name for name, module in names.items() if module is names[target.path]]
            assert list(target.names) == same
            assert target.path == same[0], "the first name in named_modules order"
            count = calls[id(names[target.path])]
            for name in target.names:  # under each of its names
                assert hooks.fired["h", name] == count
                assert not count or len(hooks.captures["h"][name]) == count
            assert target.path in str(plan) or len(hook.matches) > 3


def shared() -> Net:
    """One layer under three names; it runs three times."""
    first = nn.Linear(2, 2)
    return Net(
        lambda m, x: m.inside(m.again(m.first(x))), first=first, again=first, inside=nn.Sequential(first)
    )


@pytest.mark.parametrize(
    "select", ["first", "again", "inside.0", "type:Linear", ["inside.0", "first", "again"]]
)
def test_the_plan_shows_all_names_of_a_shared_module(select: object) -> None:
    plan = hookrun.compile(one_hook(select), shared())
    (target,) = plan.hooks[0].matches
    assert target.path == "first"
    assert list(target.names) == ["first", "again", "inside.0"]
    written = json.dumps(plan.to_dict())
    for name in target.names:
        assert name in str(plan)
        assert f'"{name}"' in written


def test_a_module_called_several_times_fires_at_each_call() -> None:
    model = shared()
    values = [torch.ones(1, 2)]
    for _ in range(3):
        values.append(model.first(values[-1]).detach())
    with hookrun.hooked(model, one_hook("first")) as hooks:
        model(values[0])
    assert_close(hooks.captures["h"]["inside.0"], values[1:])
    with pytest.raises(KeyError, match=r"no module .nowhere. in the captures of"):
        hooks.captures["h"]["nowhere"]
    with pytest.raises(KeyError):
        hooks.fired["h", "nowhere"]


@pytest.mark.parametrize(
    ("call", "picked"),
    [(0, {0}), (1, {1}), (2, {2}), ([0, 2], {0, 2}), ({"start": 1}, {1, 2}), ({"every": 2}, {0, 2})],
)
def test_when_call_selects_calls_within_each_forward(call: object, picked: set[int]) -> None:
    model = shared()
    x = torch.ones(1, 2)
    with hookrun.hooked(model, one_hook("first", "forward", "scale", factor=3, when={"call": call})) as hooks:
        found = [model(x) for _ in range(2)]
    expected = x
    for number in range(3):
        expected = model.first(expected) * (3 if number in picked else 1)
    assert_close(found, [expected, expected])
    assert hooks.fired["h", "first"] == 2 * len(picked)


def test_a_tied_parameter_is_hooked_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    spec = one_hook("**.weight", "grad")
    with hookrun.hooked(model, spec) as hooks:
        model(torch.ones(1, 2)).sum().backward()
    (target,) = hookrun.compile(spec, model).hooks[0].matches
    assert list(target.names) == ["0.weight", "2.weight"]
    assert_close(hooks.captures["h"]["2.weight"], [model[0].weight.grad])
    assert hooks.fired["h", "0.weight"] == hooks.fired["h", "2.weight"] == 1


X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Stops(nn.Module):
    """Raises once, after it has saved a tensor."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error: type[BaseException] | None = error

    def forward(self, x: Tensor) -> Tensor:
        y = x.sigmoid()
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return y


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_saved_tensors_are_hooked_during_the_forward_only(error: type[BaseException]) -> None:
    model = nn.Sequential(nn.Tanh(), Stops(error))
    spec = one_hook(["", "1"], "saved_tensors")
    x = X.clone().requires_grad_()
    with hookrun.hooked(model, spec) as hooks:
        with pytest.raises(error):
            model(x)
        before = dict(hooks.fired)
        (x.sigmoid() * x.exp()).sum().backward()  # outside module calls
        assert dict(hooks.fired) == before
        model(x).sum().backward()
        assert {key: n - before[key] for key, n in hooks.fired.items()} == {("h", ""): 2, ("h", "1"): 1}
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_an_interrupted_forward_ends_users_saved_hooks() -> None:
    model = Stops(KeyboardInterrupt)
    packed = list[Tensor]()
    x = X.clone().requires_grad_()
    theirs = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t)
    with hookrun.hooked(model, one_hook("", "saved_tensors")):
        with pytest.raises(KeyboardInterrupt), theirs:
            model(x)
        packed.clear()
        model(x).sum().backward()
        x.exp()
        assert packed == []
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@pytest.mark.parametrize("kind", ["backward", "output_grad"])
def test_gradient_hooks_are_right_after_an_interrupted_forward(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Stops(KeyboardInterrupt))
    with hookrun.hooked(model, one_hook("**", kind)) as hooks:
        with pytest.raises(KeyboardInterrupt):
            model(X)
        model(X).sum().backward()
    assert set(hooks.fired.values()) == {1}


def call_twice(model: Any, x: Tensor, depth: int = 2) -> Tensor:
    x = model.layer(x)
    return model(x, depth - 1) * (depth + 1) if depth else x


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "output_grad", "backward_pre"])
@pytest.mark.parametrize("inside", [True, False])
def test_calls_of_a_recursive_module_are_numbered_separately(kind: str, inside: bool) -> None:
    torch.manual_seed(0)
    recursive = Net(call_twice, layer=nn.Linear(4, 4))
    model, select = (nn.Sequential(recursive), "0") if inside else (recursive, "")
    numbers: dict[str, object] = {"call_0": 0, "call_1": 1, "call_2": 2, "all": {"start": 0}}
    spec = {name: one_hook(select, kind, when={"call": call})["h"] for name, call in numbers.items()}
    with hookrun.hooked(model, spec) as hooks:
        for _ in range(2):  # numbers start at 0 in each forward
            model(X.clone().requires_grad_()).sum().backward()
    captures = [hooks.captures[name][select] for name in spec]
    *of_calls, of_all = [[each[0] if isinstance(each, tuple) else each for each in kept] for kept in captures]
    assert [len(kept) for kept in of_calls] == [2, 2, 2]
    firsts = [kept[0] for kept in of_calls]
    outwards = kind == "forward"  # the innermost call returns first
    assert_close(firsts, of_all[2::-1] if outwards else of_all[:3])
    assert len({each.sum().item() for each in firsts}) == 3


def test_two_threads_can_use_one_hooked_model() -> None:
    """Each backward pass sees the gradients of its own forward, regardless of other threads."""
    torch.manual_seed(0)
    meeting = threading.Barrier(2, timeout=60)

    def meet(_: nn.Module, x: Tensor) -> Tensor:
        meeting.wait()
        y = x * x
        meeting.wait()
        return y

    model = nn.Sequential(nn.Linear(4, 4), Net(meet))
    spec: dict[str, Any] = {
        "back": {"select": "1", "hook": "backward", "action": "capture", "when": {"call": 0}},
        "out": {"select": "1", "hook": "output_grad", "action": "capture"},
        "saved": {"select": "1", "hook": "saved_tensors", "action": "stats", "of": ["bytes"]},
        "noise": {"select": "0", "hook": "forward", "action": "noise", "std": 0.1},
    }

    def run(factor: float) -> None:
        try:
            for _ in range(10):
                (model(X * factor) * factor).sum().backward()
        except BaseException:
            meeting.abort()
            raise

    with hookrun.hooked(model, spec) as hooks, ThreadPoolExecutor(2) as pool:
        list(pool.map(run, (1.0, 100.0)))
    assert {name: n for (name, _), n in hooks.fired.items()} == dict(back=20, out=20, saved=40, noise=20)
    for seen in hooks.captures["back"]["1"]:
        factor = seen["grad_output"].flatten()[0].item()
        assert factor in (1.0, 100.0)
        largest = seen["grad_input"].abs().max().item()
        assert (largest > 1000) == (factor == 100.0), "2 x times the gradient of the same call"


# ---- the user's own hooks on saved tensors


def test_a_users_saved_tensors_hooks_act_after_ours() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    events = list[str]()

    def theirs() -> Any:
        return torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: events.append("pack") or tensor, lambda tensor: events.append("unpack") or tensor
        )

    def run(spec: dict[str, Any]) -> tuple[Tensor, list[str], Any]:
        events.clear()
        x = X.clone().requires_grad_()
        with hookrun.hooked(model, spec) as hooks, theirs():
            model(x).sum().backward()
        return x.grad, list(events), hooks  # type: ignore[return-value]

    plain = run({})
    for more in ({"action": "capture"}, *({"action": "offload", "to": to} for to in ("cpu", "disk"))):
        found = run(one_hook(["", "*"], "saved_tensors", **more))
        assert torch.equal(found[0], plain[0])
        assert found[1] == plain[1] != []
        assert found[2].fired["h", ""] == 2


@pytest.mark.parametrize("early", [True, False])
def test_an_observer_keeps_the_savings_of_checkpointing(early: bool) -> None:
    def alive(spec: dict[str, Any]) -> int:
        """The number of activations that still exist after the forward."""
        block = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()) for _ in range(6)))
        activations = list[weakref.ref[Any]]()
        for _, activation in block:
            activation.register_forward_hook(
                lambda _m, _a, output: activations.append(weakref.ref(output.untyped_storage()))
            )
        x = X.clone().requires_grad_()
        with hookrun.hooked(block, spec), set_checkpoint_early_stop(early):
            output = checkpoint(block, x, use_reentrant=False)
            found = sum(each() is not None for each in activations)
            output.sum().backward()
        assert x.grad is not None
        return found

    assert alive(one_hook("**", "saved_tensors", "stats", of=["bytes"])) == alive({}) <= 1


class Block(nn.Module):
    """Calls its children in the order of their names, some of them twice."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        for module in self._modules.values():
            x = module(x)  # type: ignore[misc]
        if self.again and self._modules:
            x = next(iter(self._modules.values()))(x)  # type: ignore[misc]
        return x


def random_tree(seed: int) -> nn.Module:
    """A tree of blocks and layers; some are children of several parents, or have two names in one parent."""
    draw = random.Random(seed)
    made: list[nn.Module] = []

    def grow(depth: int) -> nn.Module:
        if made and draw.random() < 0.3:
            return draw.choice(made)
        if depth == 0 or draw.random() < 0.3:
            module: nn.Module = draw.choice([nn.Identity, nn.Tanh, lambda: nn.Linear(2, 2)])()
        else:
            module = Block(draw.random() < 0.3)
            for number in range(draw.randint(1, 3)):
                module.add_module(draw.choice("abc") + str(number), grow(depth - 1))
        made.append(module)
        return module

    root = Block(False)
    for number in range(draw.randint(1, 3)):
        root.add_module(f"m{number}", grow(3))
    return root


def calls_by_hand(model: nn.Module) -> Counter[int]:
    """Module object -> how often it runs in one forward, counted by PyTorch's own hooks."""
    calls = Counter[int]()
    modules = list(model.modules())  # each object once
    handles = [module.register_forward_hook(lambda m, *_: calls.update([id(m)])) for module in modules]
    model(torch.ones(1, 2))
    for handle in handles:
        handle.remove()
    return calls
