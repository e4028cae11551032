"""A copy of a registered hook does nothing, and neither does the original once it is cleared."""

from __future__ import annotations

import torch
from torch import nn

from hookrun.runtime.hooks.base import no_gradient, write


def test_a_new_value_is_written_into_the_same_memory_without_a_graph() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    alias = parameter.data
    write(parameter, parameter)
    write(parameter, torch.ones(2, requires_grad=True) * 3)
    assert alias.tolist() == [3, 3] and parameter.is_leaf


def test_an_output_without_a_gradient_says_why() -> None:
    assert "int without tensors" in no_gradient(3)
    assert "neither its input nor its parameters" in no_gradient(torch.zeros(1))
