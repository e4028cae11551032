"""A module with several names or parents is hooked once; a module that is called several times fires at each call."""

from __future__ import annotations

import json
import random

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import hookrun


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


def calls_by_hand(model: nn.Module) -> dict[int, int]:
    """Module object -> how often it runs in one forward, counted by PyTorch's own hooks."""
    calls: dict[int, int] = {}
    handles = [
        module.register_forward_hook(lambda m, *_: calls.update({id(m): calls.get(id(m), 0) + 1}) and None)
        for module in model.modules()  # each object once
    ]
    model(torch.ones(1, 2))
    for handle in handles:
        handle.remove()
    return calls


@pytest.mark.parametrize("part", range(4))
def test_in_random_trees_each_module_object_is_hooked_once(part: int) -> None:
    for seed in range(part * 50, part * 50 + 50):
        model = random_tree(seed)
        select = ["**", "**.{a,b}*", "type:Block", "type:Tanh"][seed % 4]
        chosen = random.Random(seed)
        names = dict(model.named_modules(remove_duplicate=False))
        calls = calls_by_hand(model)
        spec = {"h": {"select": select, "hook": "forward", "action": "capture", "expect": ">=0"}}
        plan = hookrun.compile(spec, model)
        (hook,) = plan.hooks
        objects = [id(names[target.path]) for target in hook.matches]
        assert len(objects) == len(set(objects)), "each object once"
        for target in hook.matches:
            same = [name for name, module in names.items() if module is names[target.path]]
            assert list(target.names) == same
            assert target.path == same[0], "the first name in named_modules order"
        with plan.install(model) as hooks:
            model(torch.ones(1, 2))
        for target in hook.matches:
            count = calls.get(id(names[target.path]), 0)
            for name in target.names:  # under each of its names
                assert hooks.fired["h", name] == count
                if count:
                    assert len(hooks.captures["h"][name]) == count
        if hook.matches:
            assert chosen.choice(hook.matches).path in str(plan) or len(hook.matches) > 3


class Shared(nn.Module):
    """One layer under three names; it runs three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.again = self.first
        self.inside = nn.Sequential(self.first)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(self.again(self.first(x)))


@pytest.mark.parametrize(
    "select", ["first", "again", "inside.0", "type:Linear", ["inside.0", "first", "again"]]
)
def test_the_plan_shows_all_names_of_a_shared_module(select: object) -> None:
    plan = hookrun.compile({"h": {"select": select, "hook": "forward", "action": "capture"}}, Shared())
    (target,) = plan.hooks[0].matches
    assert (target.path, list(target.names)) == ("first", ["first", "again", "inside.0"])
    shown = " ".join(str(plan).split())
    assert all(name in shown for name in ("first", "again", "inside.0"))
    written = json.dumps(plan.to_dict())
    assert all(f'"{name}"' in written for name in ("first", "again", "inside.0"))


def test_a_module_called_several_times_fires_at_each_call() -> None:
    torch.manual_seed(0)
    model, x = Shared(), torch.ones(1, 2)
    one = model.first(x)
    two = model.first(one)
    three = model.first(two)
    with hookrun.hooked(model, {"h": {"select": "first", "hook": "forward", "action": "capture"}}) as hooks:
        model(x)
    assert_close(hooks.captures["h"]["inside.0"], [each.detach() for each in (one, two, three)])


@pytest.mark.parametrize("call", [0, 1, 2, [0, 2], {"start": 1}, {"every": 2}])
def test_when_call_selects_calls_within_each_forward(call: object) -> None:
    torch.manual_seed(0)
    model, x = Shared(), torch.ones(1, 2)
    spec = {
        "h": {"select": "first", "hook": "forward", "action": "scale", "factor": 3, "when": {"call": call}}
    }
    picked = {"start": {1, 2}, "every": {0, 2}}[next(iter(call))] if isinstance(call, dict) else None
    if picked is None:
        picked = set(call) if isinstance(call, list) else {call}
    with hookrun.hooked(model, spec) as hooks:
        found = [model(x) for _ in range(2)]
    expected = x
    for number in range(3):
        expected = model.first(expected) * (3 if number in picked else 1)
    assert_close(found, [expected, expected])
    assert hooks.fired["h", "first"] == 2 * len(picked)


def test_calls_count_from_0_within_each_forward_of_the_root() -> None:
    model = Shared()
    spec = {"h": {"select": "first", "hook": "forward", "action": "print"}}
    with hookrun.hooked(model, {**spec, "c": {**spec["h"], "when": {"call": 5}}}) as hooks:
        model(torch.ones(1, 2))
        model(torch.ones(1, 2))
    assert [record["call"] for record in hooks.records] == [0, 1, 2, 0, 1, 2]


def test_a_gradient_has_the_call_number_of_its_forward() -> None:
    model = Shared()
    spec = {"h": {"select": "first", "hook": "output_grad", "action": "capture", "when": {"call": 1}}}
    gradients = list[Tensor]()
    model.first.register_forward_hook(lambda _m, _a, output: output.register_hook(gradients.append) and None)
    with hookrun.hooked(model, spec) as hooks:
        model(torch.ones(1, 2)).square().sum().backward()
    # the second of three calls is also second in the backward
    assert_close(hooks.captures["h"]["first"], [gradients[1]])


def test_a_tied_parameter_is_hooked_once_and_sees_one_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    spec = {"h": {"select": "**.weight", "hook": "grad", "action": "capture"}}
    with hookrun.hooked(model, spec) as hooks:
        model(torch.ones(1, 2)).sum().backward()
    (target,) = hookrun.compile(spec, model).hooks[0].matches
    assert list(target.names) == ["0.weight", "2.weight"]
    assert_close(hooks.captures["h"]["2.weight"], [model[0].weight.grad])
    assert hooks.fired["h", "0.weight"] == hooks.fired["h", "2.weight"] == 1


def test_a_list_of_selectors_matches_each_object_once() -> None:
    model = Shared()
    spec = {"h": {"select": ["first", "**"], "hook": "forward", "action": "scale", "factor": 2, "expect": 3}}
    assert len(hookrun.compile(spec, model).hooks[0].matches) == 3  # the root, the layer, the Sequential
