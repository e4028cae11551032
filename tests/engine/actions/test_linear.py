"""`linear`: the output becomes a linear map of the module's first argument."""

from __future__ import annotations

import pytest
import torch
from fake_site import build
from torch import nn

from hookrun.engine.actions.linear import Linear
from hookrun.engine.hook_types import FORWARD


def test_by_default_it_computes_what_the_module_computes() -> None:
    module = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    assert torch.equal(build(Linear(), module=module, args=(x,))(torch.zeros(4, 2)), module(x))


def test_other_parameters_can_be_named() -> None:
    module = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    module.probe = nn.Parameter(torch.randn(5, 3))
    linear = build(Linear(weight="probe", bias=None), module=module, args=(x,))
    assert torch.equal(linear(torch.zeros(4, 2)), x @ module.probe.T)


def test_the_parameters_are_read_at_each_call() -> None:
    module = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    linear = build(Linear(bias=None), module=module, args=(x,))
    linear(torch.zeros(4, 2)).sum().backward()
    torch.testing.assert_close(module.weight.grad, x.sum(0).expand(2, 3))
    assert module.bias.grad is None
    with torch.no_grad():
        module.weight.zero_()
    assert torch.equal(linear(torch.zeros(4, 2)), torch.zeros(4, 2))


def test_a_call_without_a_positional_argument_is_an_error() -> None:
    with pytest.raises(ValueError, match="first positional argument"):
        build(Linear(), module=nn.Linear(3, 2))(torch.zeros(4, 2))


def test_a_module_that_lacks_one_does_not_fit() -> None:
    reason = Linear(weight="wieght").incompatibility(FORWARD, nn.Linear(3, 2), ["weight", "bias"])
    assert reason == "the module has no parameter 'wieght' (weight): did you mean 'weight'?"
    reason = Linear().incompatibility(FORWARD, nn.Linear(3, 2, bias=False), ["weight"])
    assert reason == "the module has no parameter 'bias' (bias): there are: weight; `bias: null` does without"
    assert Linear(bias=None).incompatibility(FORWARD, nn.Linear(3, 2, bias=False), ["weight"]) is None
