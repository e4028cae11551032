"""Followers are called before each step of every optimizer, while the gradients exist, and after it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from hookrun.engine.runtime.optimizers import follow, without_compiler


class Around(Optimizer):
    """Steps other optimizers twice within its own step, as Lookahead, SAM and ZeroRedundancyOptimizer step theirs."""

    def __init__(self, parameters: Any, *inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for optimizer in self.inner * 2:
            optimizer.step(closure)


class Derived(SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("closure", [None, lambda: torch.zeros(())], ids=["plain", "with a closure"])
def test_each_parameter_is_followed_in_its_outermost_step_alone(closure: Any) -> None:
    first = nn.Parameter(torch.ones(1))
    second = nn.Parameter(torch.ones(1))
    third = nn.Parameter(torch.ones(1))
    names = {id(first): 1, id(second): 2, id(third): 3}
    inner = SGD([first, second], lr=0.1)
    heard = list[tuple[str, set[int]]]()

    def note(when: str) -> Any:
        return lambda optimizer, parameters: heard.append((when, {names[id(each)] for each in parameters}))

    unfollow = follow(note("before"), note("after"))
    try:
        Derived([first], lr=0.1).step(closure)
        alone = heard
        heard = []
        Around([first, second], inner).step(closure)
        whole = heard
        heard = []
        Around([third], inner).step(closure)  # the inner steps are the outermost ones of their parameters
    finally:
        unfollow()
    assert alone == [("before", {1}), ("after", {1})]
    assert {key for key, _ in whole} == {"before", "after"}
    for _, of in whole:
        assert of == {1, 2}
    assert [key for key, _ in whole].count("after") == 1
    assert [of for key, of in heard if key == "after"] == [{1, 2}, {1, 2}, {3}]


def trained(cls: type) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 3, bias=False))
    optimizer = cls(model.parameters())
    steps = list[Optimizer]()
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: steps.append(optimizer))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert torch.is_grad_enabled()
    assert len(steps) == 3
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return weights.tolist(), repr(optimizer), cls.__module__, cls.__qualname__


def test_every_optimizer_trains_to_the_same_weights() -> None:
    for name, cls in vars(torch.optim).items():
        is_class = isinstance(cls, type) and issubclass(cls, Optimizer)
        if not is_class or name in ("Optimizer", "LBFGS", "SparseAdam"):  # which need more than a gradient
            continue
        without_compiler.cache_clear()  # so that it meets classes that were used before, and new ones
        first = trained(without_compiler(cls))
        assert first == trained(cls), name
        without_compiler.cache_clear()
        assert first == trained(without_compiler(cls)), name


def test_no_method_imports_the_compiler() -> None:
    plain = without_compiler(SGD)
    for name in ("zero_grad", "add_param_group", "state_dict", "load_state_dict", "step"):
        assert getattr(plain, name) is not getattr(SGD, name), name


def test_a_differentiable_step_keeps_its_graph() -> None:
    start = torch.ones(2, requires_grad=True)
    weight = start.clone()
    optimizer = without_compiler(SGD)([weight], lr=0.5, differentiable=True)
    weight.grad = torch.ones(2)
    optimizer.step()
    weight.sum().backward()
    assert start.grad is not None
    assert start.grad.tolist() == [1, 1]


def test_it_is_copied_as_torch_s_own_class() -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = without_compiler(SGD)([weight], lr=0.5, momentum=0.9)
    weight.sum().backward()
    optimizer.step()
    for protocol in (0, pickle.HIGHEST_PROTOCOL):
        again = pickle.loads(pickle.dumps(optimizer, protocol))
        assert type(again) is SGD
        assert again.param_groups[0]["lr"] == 0.5
        assert again.state_dict()["state"][0]["momentum_buffer"].tolist() == [1, 1]
    assert type(copy.deepcopy(optimizer)) is SGD
