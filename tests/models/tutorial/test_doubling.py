"""The numbers of the tutorials, by hand-written hooks: b = 2a, rows 1 and 2."""

from __future__ import annotations

import torch
from torch.testing import assert_close
from tutorial_models import model_of, on_output_grad


def test_doubling_has_gradients_of_0_2_and_0_4() -> None:
    model, seen = model_of("doubling"), []
    on_output_grad(model.b, seen.append)
    model().mean().backward()
    assert_close(seen, [torch.full((5,), 0.2)])
    assert_close(model.a.grad, torch.full((5,), 0.4))


def test_doubling_b_s_gradient_during_backward_doubles_a_s() -> None:
    model = model_of("doubling")
    on_output_grad(model.b, lambda grad: grad * 2)
    model().mean().backward()
    assert_close(model.a.grad, torch.full((5,), 0.8))
