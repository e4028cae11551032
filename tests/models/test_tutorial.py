"""The numbers of the tutorials, by hand-written hooks: rows 1 to 20."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from tutorial_models import model_of, near, on_output_grad


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


def test_pooling_returns_eight_channels_of_4x4() -> None:
    model, seen = model_of("pooling", shape=(3, 10, 10)), []
    model.pool.register_forward_hook(lambda _m, _args, output: seen.append(list(output.shape)))
    assert model(torch.randn(1, 3, 10, 10)).shape == (1, 1)
    assert seen == [[1, 8, 4, 4]]


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
