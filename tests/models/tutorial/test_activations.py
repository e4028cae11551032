"""The numbers of the tutorials, by hand-written hooks: hooks on every leaf, row 13."""

from __future__ import annotations

import torch
from torch import nn
from tutorial_models import model_of


def names_of_leaves(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if not list(module.children())]


def test_the_leaves_of_activations_are_the_tutorial_s_five() -> None:
    model, seen = model_of("activations"), {}
    assert names_of_leaves(model) == ["conv", "relu", "fc1", "seq.0", "seq.1"]
    for name in names_of_leaves(model):
        model.get_submodule(name).register_forward_hook(
            lambda _m, _args, output, name=name: seen.update({name: list(output.shape)})
        )
    model(torch.rand(2, 3, 8, 8))
    assert seen == {
        "conv": [2, 10, 4, 4],
        "relu": [2, 10, 4, 4],
        "fc1": [2, 5],
        "seq.0": [2, 3],
        "seq.1": [2, 2],
    }
