"""The multi-layer perceptron: alternating linear layers and ReLU."""

from __future__ import annotations

import torch

from hookrun.models.mlp import MLP


def test_mlp_alternates_linear_and_relu_and_ends_in_fc() -> None:
    model = MLP(64, 10, (7, 5))
    assert [(name, type(m).__name__) for name, m in model.named_modules() if not list(m.children())] == [
        ("flatten", "Flatten"),
        ("layers.0", "Linear"),
        ("layers.1", "ReLU"),
        ("layers.2", "Linear"),
        ("layers.3", "ReLU"),
        ("fc", "Linear"),
    ]
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 10)


def test_mlp_without_hidden_layers_is_linear() -> None:
    model = MLP(6, 10, ())
    assert list(dict(model.named_parameters())) == ["fc.weight", "fc.bias"]
    assert model(torch.rand(2, 6)).shape == (2, 10)
