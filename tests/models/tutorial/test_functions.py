"""The numbers of the tutorials, by hand-written hooks: four modules in a sequence, rows 19 and 20."""

from __future__ import annotations

import torch
from torch import nn
from torch.testing import assert_close
from tutorial_models import model_of


def test_functions_can_be_chosen_by_their_class_names_alone() -> None:
    named = {name: type(m).__name__ for name, m in model_of("functions").named_modules()}
    assert {name for name, cls in named.items() if cls.startswith("Function_")} == {
        "ab.a",
        "ab.b",
        "cd.c",
        "cd.d",
    }


def test_functions_add_subtract_multiply_and_divide() -> None:
    model = model_of("functions")
    a, b, c, d = (m.W for m in (model.ab.a, model.ab.b, model.cd.c, model.cd.d))
    assert_close(model(), (model.x + a - b) * c / d)


def test_functions_become_linear_by_an_added_parameter_and_a_hook() -> None:
    model = model_of("functions")

    def prepare(module: nn.Module) -> None:
        if type(module).__name__.startswith("Function_"):
            nn.init.ones_(module.W)
            module.register_parameter("b", nn.Parameter(torch.ones(2)))
            module.register_forward_hook(lambda m, args, _output: args[0] @ m.W.T + m.b)

    model.apply(prepare)
    expected = model.x
    for _ in range(4):
        expected = expected @ torch.ones(2, 2) + 1
    output = model()
    assert_close(output, expected)
    output.mean().backward()
    assert_close(model.cd.d.b.grad, torch.full((2,), 0.5))
