"""A sharded tensor is seen whole, and each rank keeps its own part; hooks that came too late are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookrun
from hookrun.errors import HookError
from hookrun.runtime.sharded import (
    HookedParameters,
    edited,
    is_fully_sharded,
    is_sharded,
    like,
    move_inside_sharding,
    own_part,
    reduces,
    sharded_modules,
    whole,
    whole_of,
)


class Op:
    """A firing that adds a number, or does nothing for 0."""

    def __init__(self, number: float) -> None:
        self.number = number

    def op(self, x: Tensor) -> Tensor:
        return x if self.number == 0 else x + self.number


def test_an_unsharded_tensor_is_passed_as_the_same_object() -> None:
    x = torch.zeros(2)
    assert not is_sharded(x)
    assert all(each is x for each in (whole(x), own_part(x), like(x, torch.ones(2)), whole_of(x, x)))
    unchanged: Any = [Op(0)]
    changing: Any = [Op(1), Op(2)]
    assert edited(x, unchanged) is x
    assert edited(x, changing).tolist() == [3, 3] and x.tolist() == [0, 0]


def test_an_unsharded_model_is_not_changed() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    spec = {"h": {"select": "0", "hook": "forward", "action": "scale", "factor": 2.0}}
    with hookrun.hooked(model, spec):
        numbers = list(model[0]._forward_hooks)
        move_inside_sharding(model, numbers)
        assert list(model[0]._forward_hooks) == numbers
    assert not list(sharded_modules(model)) and not is_fully_sharded(model) and reduces(model)


def hooked() -> tuple[nn.Sequential, HookedParameters]:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    parameters = HookedParameters(model)
    parameters.add("0.weight", model[0])
    return model, parameters


def test_a_parameter_that_was_replaced_is_an_error_at_the_next_step() -> None:
    model, parameters = hooked()
    optimizer = torch.optim.SGD(model.parameters())
    parameters.follow(optimizer)
    model[0].weight = nn.Parameter(torch.zeros(1, 1))
    assert not parameters.all_there
    for check in (lambda: parameters.follow(optimizer), lambda: parameters.follow(shards=False)):
        with pytest.raises(HookError, match=r"parameter 0\.weight was replaced after hooks were installed"):
            check()
    parameters.places.clear()
    parameters.follow(optimizer)


def test_a_parameter_that_moved_within_the_model_keeps_its_hooks() -> None:
    model, parameters = hooked()
    old = model[0].weight
    model[0].weight, model[1].weight = model[1].weight, old
    parameters.follow(shards=False)
