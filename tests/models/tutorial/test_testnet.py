"""The numbers of the tutorials, by hand-written hooks: a net on one image, rows 7 to 9."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from tutorial_models import model_of, on_output_grad


def test_testnet_draws_its_input_before_its_layers() -> None:
    model = model_of("testnet")
    torch.manual_seed(2)
    assert torch.equal(model.x, torch.randn(1, 3, 8, 8))
    assert torch.equal(model.conv.weight, nn.Conv2d(3, 10, 2, stride=2).weight)


def test_the_gradient_of_testnet_s_bias_is_minus_0_2_or_zero_if_replaced() -> None:
    plain, zeroed = model_of("testnet"), model_of("testnet")
    zeroed.fc.bias.register_hook(torch.zeros_like)
    for model in (plain, zeroed):
        model().backward()
    assert_close(plain.fc.bias.grad, torch.full((5,), -0.2))
    assert_close(zeroed.fc.bias.grad, torch.zeros(5))


def test_hooks_at_the_relu_of_testnet_fire_in_order_on_a_clamped_gradient() -> None:
    model, seen = model_of("testnet"), []
    on_output_grad(model.flatten, lambda grad: seen.append(list(grad.shape)))
    on_output_grad(model.relu, lambda grad: grad.clamp(min=0))
    on_output_grad(model.relu, lambda grad: seen.append(list(grad.shape)))
    on_output_grad(model.relu, lambda grad: seen.append(bool((grad < 0).any())))
    model().backward()
    assert seen == [[160], [1, 10, 4, 4], False]


def test_the_gradients_at_testnet_s_fc_and_conv_have_the_right_shapes() -> None:
    model, seen = model_of("testnet"), {}

    def shape(grads: tuple[Tensor | None, ...]) -> list[int] | None:
        return None if grads[0] is None else list(grads[0].shape)

    for name in ("fc", "conv"):
        model.get_submodule(name).register_full_backward_hook(
            lambda _m, grad_in, grad_out, name=name: seen.update({name: (shape(grad_in), shape(grad_out))})
        )
    with pytest.warns(
        UserWarning, match="Full backward hook is firing"
    ):  # no input of `conv` requires a gradient
        model().backward()
    assert seen == {"fc": ([160], [5]), "conv": (None, [1, 10, 4, 4])}
