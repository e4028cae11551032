"""Hooks on a parameter that was replaced are refused; a parameter that moved keeps its hooks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hookrun.errors import HookError
from hookrun.runtime.sharded import HookedParameters, edited


def test_an_unsharded_tensor_that_no_hook_changes_is_the_same_object() -> None:
    x, same = torch.zeros(2), SimpleNamespace(op=lambda value: value)
    firings: Any = [same, same]
    assert edited(x, firings) is x


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
