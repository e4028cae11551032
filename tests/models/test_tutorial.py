"""What the tutorials' models are, beside the numbers that tests/conf compares with hand-written hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.testing import assert_close

from hookrun.models import build
from hookrun.spec.experiment import Model


def model_of(name: str, shape: tuple[int, ...] = (1, 8, 8)) -> Any:
    """The model with the tutorial's seed."""
    torch.manual_seed(2)
    return build(Model(name=f"tutorial/{name}"), sample_shape=shape, num_classes=10, trust=frozenset())


def test_testnet_draws_its_input_before_its_layers() -> None:
    model = model_of("testnet")
    torch.manual_seed(2)
    assert torch.equal(model.x, torch.randn(1, 3, 8, 8))
    assert torch.equal(model.conv.weight, nn.Conv2d(3, 10, 2, stride=2).weight)


def test_pooling_returns_eight_channels_of_4x4() -> None:
    model, seen = model_of("pooling", shape=(3, 10, 10)), list[Any]()
    model.pool.register_forward_hook(lambda _m, _args, output: seen.append(list(output.shape)))
    assert model(torch.randn(1, 3, 10, 10)).shape == (1, 1)
    assert seen == [[1, 8, 4, 4]]


def test_functions_are_chosen_by_class_and_compute_elementwise() -> None:
    model = model_of("functions")
    named = [name for name, m in model.named_modules() if type(m).__name__.startswith("Function_")]
    assert named == ["ab.a", "ab.b", "cd.c", "cd.d"]
    a, b, c, d = (model.get_submodule(name).W for name in named)
    assert_close(model(), (model.x + a - b) * c / d)
