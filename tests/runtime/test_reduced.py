"""Hooks on gradients that ranks sum run afterwards: the last layers first, `grad` before the earlier part is added."""

from __future__ import annotations

import torch
from torch import nn

from hookrun.runtime.hooks.base import ParameterHook
from hookrun.runtime.reduced import ReducedGradients


class Noted(ParameterHook):
    """Doubles a gradient, and records what it saw."""

    def __init__(self, name: str, seen: list[tuple[str, float]], *, before: bool) -> None:
        super().__init__()
        self.name, self.seen, self.before_accumulation = name, seen, before  # type: ignore[misc]

    def reduced(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self.seen.append((self.name, parameter.grad.item()))
        parameter.grad *= 2


def parameter(grad: float) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(()))
    made.grad = torch.tensor(grad)
    return made


def test_hooks_see_the_sums_in_the_order_of_a_backward_pass() -> None:
    seen, first, last = list[tuple[str, float]](), parameter(1.0), parameter(10.0)
    gradients = ReducedGradients()
    gradients.add(first, Noted("first", seen, before=True))
    gradients.add(last, Noted("last accumulated", seen, before=False))
    gradients.add(last, Noted("last", seen, before=True))
    gradients.run(before=[(last, torch.tensor(5.0)), (parameter(0.0), None)])
    assert seen == [("last", 10.0), ("last accumulated", 25.0), ("first", 1.0)]
    assert last.grad is not None and last.grad.item() == 50


def test_parameters_outside_of_the_backward_pass_keep_their_gradient() -> None:
    seen, first, last = list[tuple[str, float]](), parameter(1.0), parameter(10.0)
    gradients = ReducedGradients()
    for name, each in (("first", first), ("last", last)):
        gradients.add(each, Noted(name, seen, before=True))
    gradients.run(only={id(last)})
    assert seen == [("last", 10.0)] and first.grad is not None and first.grad.item() == 1
    shard = parameter(3.0)
    gradients.move({id(last): shard})
    gradients.run(only={id(shard)})
    assert seen[1:] == [("last", 3.0)] and gradients.parameters == [first, shard]
