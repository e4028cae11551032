"""A copy of a registered hook does nothing, and neither does the original once it is cleared."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

import hookrun
from hookrun.runtime.hooks.base import no_gradient, write


def test_a_copy_of_a_hooked_model_is_not_hooked() -> None:
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)
    plain = model(x)
    spec = {"h": {"select": "0", "hook": "forward", "action": "scale", "factor": 2.0}}
    with hookrun.hooked(model, spec):
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(x), plain)
        assert torch.equal(model(x), plain * 2)


def test_a_new_value_is_written_into_the_same_memory_without_a_graph() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    alias = parameter.data
    write(parameter, parameter)
    write(parameter, torch.ones(2, requires_grad=True) * 3)
    assert alias.tolist() == [3, 3] and parameter.is_leaf


def test_an_output_without_a_gradient_says_why() -> None:
    assert "int without tensors" in no_gradient(3)
    assert "neither its input nor its parameters" in no_gradient(torch.zeros(1))
