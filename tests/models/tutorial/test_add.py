"""The numbers of the tutorials, by hand-written hooks: the sum of two numbers, rows 14 to 16."""

from __future__ import annotations

import torch
from torch.testing import assert_close
from tutorial_models import model_of


def test_add_shows_both_inputs_and_then_the_output() -> None:
    model, seen = model_of("add"), []
    model.add.register_forward_pre_hook(lambda _m, args: seen.extend(args))
    model.add.register_forward_hook(lambda _m, _args, output: seen.append(output))
    model()
    assert_close(seen, [model.x1, model.x2, model.x1 + model.x2])


def test_add_s_output_can_be_raised_by_five_and_its_input_scaled_without_touching_the_caller_s() -> None:
    model, plain = model_of("add"), model_of("add")
    model.add.register_forward_pre_hook(lambda _m, args: tuple(2 * x for x in args))
    model.add.register_forward_hook(lambda _m, _args, output: output + 5)
    assert_close(model(), 2 * (plain.x1 + plain.x2) + 5)
    assert torch.equal(model.x1, plain.x1)
