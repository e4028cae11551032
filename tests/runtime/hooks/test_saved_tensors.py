"""Tensors that autograd saves in a module's forward are seen by its hook, and by no hook of another module."""

from __future__ import annotations

import torch
from torch import nn

import hookrun


def test_saved_tensors_are_cast_in_their_module_only_and_restored() -> None:
    model, x = nn.Sequential(nn.Tanh(), nn.Tanh()), torch.linspace(-1, 1, 5, requires_grad=True)
    spec = {"h": {"select": "0", "hook": "saved_tensors", "action": "cast", "dtype": "bfloat16"}}
    with hookrun.hooked(model, spec) as hooks:
        model(x).sum().backward()
        assert hooks.fired["h", "0"] == 1
    first = x.detach().tanh()
    rounded = first.bfloat16().float()
    assert x.grad is not None
    assert torch.allclose(x.grad, (1 - first.tanh() ** 2) * (1 - rounded**2))
    assert not torch.equal(first, rounded)
