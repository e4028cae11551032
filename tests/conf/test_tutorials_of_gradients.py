"""What the tutorials do with gradients and saved tensors, by experiments and by hand-written PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import hookrun
from hookrun.errors import CheckFailed
from hookrun.store.reader import Run

Runs = Callable[..., Run]
Models = Callable[..., nn.Module]
OnGradient = Callable[..., None]


def test_01_the_gradients_of_a_and_b_are_printed(in_memory, capsys: Any) -> None:
    in_memory(1)
    printed = capsys.readouterr().out.splitlines()
    assert "print_b  b  value=[0.2, 0.2, 0.2, 0.2, 0.2]" in printed
    assert "print_a  a  value=[0.4, 0.4, 0.4, 0.4, 0.4]" in printed


def test_02_doubling_b_s_gradient_during_backward_doubles_a_s(in_memory, model_of, on_gradient) -> None:
    _, captures = in_memory(2)
    gradients = captures["gradients"]["a"]
    assert_close(gradients, [torch.full((5,), 0.8)])
    model = model_of("tutorial/doubling")
    on_gradient(model.b, lambda grad: 2 * grad)
    model().mean().backward()
    assert_close(gradients[0], model.a.grad)


def test_03_doubling_the_loss_s_gradient_doubles_all_upstream(in_memory, model_of, on_gradient) -> None:
    _, captures = in_memory(3)
    gradients = captures["gradients"]
    model = model_of("tutorial/regression", seed=2)
    on_gradient(model.loss, lambda grad: 2 * grad)
    model().backward()
    assert_close([gradients[name][0] for name in "wb"], [model.w.grad, model.b.grad])


def test_04_doubling_w_s_gradient_leaves_the_others(in_memory, model_of: Models) -> None:
    _, captures = in_memory(4)
    gradients = captures["gradients"]
    model = model_of("tutorial/regression", seed=2)
    model.w.register_hook(lambda grad: 2 * grad)
    model().backward()
    assert_close([gradients[name][0] for name in "wb"], [model.w.grad, model.b.grad])
    assert_close(captures["gradient_of_y"]["y"][0], model.b.grad)


def test_05_the_gradient_of_y_is_captured(in_memory, model_of: Models, on_gradient: OnGradient) -> None:
    _, captures = in_memory(5)
    (gradient,) = captures["gradient_of_y"]["y"]
    model, seen = model_of("tutorial/regression", seed=2), list[Tensor]()
    on_gradient(model.y, seen.append)
    model().backward()
    assert_close([gradient], seen)


def test_06_no_gradient_is_outside_of_the_range_and_training_works(tutorial: Runs) -> None:
    seen = "+hooks.seen={select: '**', hook: post_accumulate_grad, action: capture}"
    run = tutorial(6, seen, "train.epochs=2")
    gradients = [run.captures["seen"][name][:] for name in run.captures["seen"]]
    assert len(gradients) == 6
    assert all(gradient.abs().max() <= 0.01 for gradient in gradients)
    assert any(gradient.abs().max() == pytest.approx(0.01) for gradient in gradients)
    losses = [line["loss"] for line in run.metrics if line["split"] == "train"]
    assert losses[1] < losses[0]


def test_07_the_bias_s_gradient_is_zero(in_memory, model_of: Models) -> None:
    _, captures = in_memory(7)
    assert_close(captures["gradients"]["fc.bias"], [torch.zeros(5)])
    model = model_of("tutorial/testnet", seed=2)
    model().backward()
    assert_close(model.fc.bias.grad, torch.full((5,), -0.2))


def test_08_three_hooks_of_one_module_fire_in_order(in_memory, capsys, model_of, on_gradient) -> None:
    before = "+hooks.before={select: relu, hook: output_grad, action: capture, priority: -1}"
    after = "+hooks.after={select: relu, hook: output_grad, action: capture}"
    _, captures = in_memory(8, before, after)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("print_")]
    assert printed[:2] == ["print_flatten  flatten  shape=[160]", "print_relu  relu  shape=[1, 10, 4, 4]"]

    model, seen = model_of("tutorial/testnet", seed=2), list[Tensor]()
    for hook in (seen.append, lambda grad: grad.clamp(min=0), seen.append):
        on_gradient(model.relu, hook)
    model().backward()
    assert_close([captures[name]["relu"][0] for name in ("before", "after")], seen)
    assert [bool((grad < 0).any()) for grad in seen] == [True, False]

    in_memory(8, "+hooks.print_relu.what=stats")
    assert " min=0 " in capsys.readouterr().out  # printed after the clamp
    # the check comes before the clamp, and fails
    with pytest.raises(CheckFailed, match=r"hook 'check_relu' \(output_grad, check\) on relu"):
        in_memory(8, "+hooks.clamp_relu.priority=1")


def test_09_a_backward_hook_shows_the_true_shapes(in_memory, capsys: Any) -> None:
    in_memory(9)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("shapes  ")]
    assert printed == [
        "shapes  fc grad_input  shape=[160]",
        "shapes  fc grad_output  shape=[5]",
        "shapes  conv grad_input  shape=None",
        "shapes  conv grad_output  shape=[1, 10, 4, 4]",
    ]


def test_17_the_gradients_of_inputs_output_and_weight_are_autograd_s(in_memory, model_of) -> None:
    model, seen = model_of("tutorial/product"), list[Tensor]()
    model.function.register_full_backward_hook(
        lambda module, grad_input, grad_output: seen.extend((*grad_input, *grad_output))
    )
    model.function.W.register_hook(seen.append)
    model().mean().backward()
    _, captures = in_memory(17)
    (values,) = captures["of_values"]["function"]
    found = [*values["grad_input"], values["grad_output"], *captures["of_weight"]["function.W"]]
    assert len(seen) == 4
    assert sorted(map(float, found)) == pytest.approx(sorted(map(float, seen)))  # in either order

    output = (again := model_of("tutorial/product"))()
    inputs = [again.x1, again.x2, output, again.function.W]
    assert_close(found, list(torch.autograd.grad(output.mean(), inputs)))


def test_18_nothing_is_edited_in_place(model_of: Models) -> None:
    """Both inputs of a sum receive the very same gradient: scaled in place, each would be scaled twice."""
    model, given = model_of("tutorial/add"), list[Tensor]()
    model.add.register_forward_hook(lambda module, args, output: output.register_hook(given.append) and None)
    with hookrun.hooked(model, {"triple": dict(select="add", hook="backward", action="scale", factor=3)}):
        model().sum().backward()
    assert_close([model.x1.grad, model.x2.grad, *given], [torch.tensor([n]) for n in (3.0, 3.0, 1.0)])


def test_18_upstream_modules_receive_the_scaled_gradients(in_memory, model_of: Models) -> None:
    model, given = model_of("tutorial/product"), list[Tensor]()

    def triple(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        given.extend(grad_input)
        return tuple(3 * grad for grad in grad_input)

    model.function.register_full_backward_hook(triple)
    model().mean().backward()
    before = "+hooks.before={select: function, hook: backward, action: capture, priority: -1}"
    _, captures = in_memory(18, before)
    gradients = captures["gradients"]
    for name in ("x1", "x2", "function.W"):
        assert_close(gradients[name][0], model.get_parameter(name).grad)
    (seen,) = captures["before"]["function"]
    for number, name in enumerate(("x1", "x2")):
        assert_close(seen["grad_input"][number], given[number])
        assert_close(gradients[name][0], 3 * given[number])


def test_21_saved_tensors_in_another_form_give_the_same_gradients(under_hooks, model_of) -> None:
    plain, data = hookrun.build(
        experiment="tutorial/21_saved_tensors_to_cpu", overrides=["compute.device=cpu"]
    )
    inputs = next(iter(data.loader("train"))).inputs
    plain(inputs).mean().backward()
    floats, integers = saved_by_hand(model_of("cnn"))
    assert min(floats, integers) > 100_000
    forms = {"to_cpu": (0, floats + integers), "to_disk": (0, 0), "smaller": (0.02, floats // 2 + integers)}
    for name, (tolerance, held) in forms.items():
        model, hooks = under_hooks(21, inputs=(inputs,), name=f"saved_tensors_{name}")
        for path, parameter in plain.named_parameters():
            expected = parameter.grad
            assert expected.norm() > 0
            assert (model.get_parameter(path).grad - expected).norm() <= tolerance * expected.norm()
        counted = {
            hook: sum(line["bytes"] for line in hooks.records if line["hook"] == hook)
            for hook in ("saved", "held")
        }
        assert counted == {"saved": floats + integers, "held": held}


def saved_by_hand(model: nn.Module) -> tuple[int, int]:
    """Bytes of what autograd saves in a forward on one batch of digits, parameters aside: floats and integers."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    floats, integers = list[int](), list[int]()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            (floats if tensor.is_floating_point() else integers).append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.rand(64, 1, 8, 8))
    return sum(floats), sum(integers)


@pytest.mark.parametrize(
    ("overrides", "order", "expected"),
    [((), (0, 1), (0.2 + 1) * 2), (("+hooks.second.priority=-1",), (1, 0), 0.2 * 2 + 1)],
    ids=["the order of the file", "by priority"],
)
def test_22_the_order_is_the_file_s_and_priority_changes_it(
    in_memory: Callable[..., Any],
    overrides: tuple[str, ...],
    order: tuple[int, int],
    expected: float,
    model_of: Models,
    on_gradient: OnGradient,
) -> None:
    model = model_of("tutorial/doubling")
    steps: list[Callable[[Tensor], Tensor]] = [lambda grad: grad + 1, lambda grad: 2 * grad]
    for number in order:
        on_gradient(model.b, steps[number])
    model().mean().backward()
    _, captures = in_memory(22, *overrides)
    (gradient,) = captures["gradient"]["a"]
    assert_close(gradient, torch.full((5,), 2 * expected))  # b = 2a
    assert_close(gradient, model.a.grad)
