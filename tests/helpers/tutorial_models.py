"""The models of the hook tutorials, and hooks on them written by hand."""

from __future__ import annotations

import torch
from torch import nn
from torch.testing import assert_close

from hookrun.models import build
from hookrun.spec.experiment import Model


def model_of(name: str, seed: int = 2, shape: tuple[int, ...] = (3, 8, 8)) -> nn.Module:
    torch.manual_seed(seed)
    return build(Model(name=f"tutorial/{name}"), sample_shape=shape, num_classes=2, trust=frozenset())


def near(value: object, expected: object) -> None:
    assert_close(value, expected, rtol=0, atol=1e-4)


def on_output_grad(module: nn.Module, function: object) -> None:
    """What the hook type `output_grad` is: a tensor hook on the output."""
    module.register_forward_hook(lambda _module, _args, output: output.register_hook(function) and None)
