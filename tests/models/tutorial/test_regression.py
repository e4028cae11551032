"""The numbers of the tutorials, by hand-written hooks: y = x·w + b, rows 3 to 5."""

from __future__ import annotations

import torch
from tutorial_models import model_of, near, on_output_grad

ROW_3_B = torch.tensor([-1.8891, 0.5235, 0.4592])


ROW_3_W = torch.full((5,), -0.9064)


def test_regression_has_the_tutorial_s_gradients_with_seed_2() -> None:
    model = model_of("regression")
    model().backward()
    near(model.w.grad, ROW_3_W)
    near(model.b.grad, ROW_3_B)


def test_doubling_the_gradient_of_the_loss_doubles_both() -> None:
    model = model_of("regression")
    on_output_grad(model.loss, lambda grad: grad * 2)
    model().backward()
    near(model.w.grad, torch.full((5,), -1.8128))
    near(model.b.grad, torch.tensor([-3.7783, 1.0471, 0.9184]))


def test_doubling_the_gradient_of_w_leaves_b_alone() -> None:
    model = model_of("regression")
    model.w.register_hook(lambda grad: grad * 2)
    model().backward()
    near(model.w.grad, 2 * ROW_3_W)
    near(model.b.grad, ROW_3_B)


def test_the_gradient_of_y_is_seen_at_its_module() -> None:
    model, seen = model_of("regression"), []
    on_output_grad(model.y, seen.append)
    model().backward()
    near(seen, [ROW_3_B])
