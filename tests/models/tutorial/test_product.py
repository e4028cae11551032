"""The numbers of the tutorials, by hand-written hooks: x1 · x2 · W, rows 17 and 18."""

from __future__ import annotations

import torch
from torch.testing import assert_close
from tutorial_models import model_of


def test_product_has_the_gradients_of_both_inputs_the_output_and_w() -> None:
    model, seen = model_of("product"), {}
    model.function.register_full_backward_hook(
        lambda _m, grad_in, grad_out: seen.update(x1=grad_in[0], x2=grad_in[1], output=grad_out[0])
    )
    model.function.W.register_hook(lambda grad: seen.update(W=grad))
    model().mean().backward()
    expected = {"x1": 5 * model.x2, "x2": 5 * model.x1, "output": torch.ones(1), "W": model.x1 * model.x2}
    assert_close(seen, {name: value.detach() for name, value in expected.items()})


def test_a_full_backward_hook_scales_what_product_s_inputs_receive() -> None:
    model = model_of("product")
    model.function.register_full_backward_hook(lambda _m, grad_in, _out: tuple(3 * grad for grad in grad_in))
    model().mean().backward()
    assert_close(model.x1.grad, 15 * model.x2.detach())
    assert_close(model.function.W.grad, (model.x1 * model.x2).detach())
