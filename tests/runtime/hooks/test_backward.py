"""`backward` and `backward_pre`, also where PyTorch's own full backward hooks fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hooking import one_hook
from torch import Tensor, nn

import hookrun

# These set-ups contain hooks that do nothing; tests/semantics/test_never_fired.py tests the warning.
pytestmark = pytest.mark.filterwarnings("ignore::hookrun.HookrunWarning")


class Residual(nn.Module):
    """A block with functional in-place operations around its children."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.bn = nn.BatchNorm2d(2)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn(self.conv(x))
        out += x
        return self.relu(out)


class Add(nn.Module):
    def forward(self, x: Tensor, *, other: Tensor) -> dict[str, Tensor]:
        return {"sum": x + other, "product": x * other}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), Residual(), Residual(), nn.Flatten(), nn.Linear(72, 3))


def run(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(torch.randn(2, 1, 8, 8)).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def capture(select: Any, hook: str = "backward", **more: Any) -> dict[str, Any]:
    return one_hook(select, hook, **more)


def test_every_module_of_a_train_mode_network_with_in_place_operations_can_be_observed() -> None:
    model = net()
    plain = run(model)
    with hookrun.hooked(model, capture("**")) as hooks:
        found = run(model)
    for name, grad in plain.items():
        torch.testing.assert_close(found[name], grad)
    assert set(hooks.fired.values()) == {1}


def test_the_values_equal_those_of_pytorchs_own_hook_where_it_works() -> None:
    model, seen = net(), []
    handle = model[4].register_full_backward_hook(lambda module, grads, outs: seen.append((grads, outs)))
    run(model)
    handle.remove()
    with hookrun.hooked(model, capture("4")) as hooks:
        run(model)
    (value,) = hooks.captures["h"]["4"]
    assert torch.equal(value["grad_input"], seen[0][0][0])
    assert torch.equal(value["grad_output"], seen[0][1][0])


def test_the_first_module_has_no_gradient_of_its_input() -> None:
    model = net()
    with hookrun.hooked(model, capture("0")) as hooks:
        run(model)
    (value,) = hooks.captures["h"]["0"]
    assert value["grad_input"] is None
    assert value["grad_output"].shape == (2, 2, 6, 6)


def test_an_edit_scales_what_flows_upstream_and_nothing_else() -> None:
    model = net()
    plain = run(model)
    with hookrun.hooked(model, one_hook("4", "backward", "scale", factor=2)):
        found = run(model)
    assert torch.equal(found["4.weight"], plain["4.weight"])
    torch.testing.assert_close(found["0.weight"], plain["0.weight"] * 2)


def test_backward_pre_edits_the_gradient_of_the_output() -> None:
    model = net()
    plain = run(model)
    with hookrun.hooked(model, one_hook("4", "backward_pre", "scale", factor=2)):
        found = run(model)
    for name, grad in plain.items():
        torch.testing.assert_close(found[name], grad * 2)


def test_the_same_tensor_given_twice_has_two_gradients() -> None:
    model = nn.ModuleDict({"b": nn.Bilinear(1, 1, 1, bias=False)})
    x = torch.tensor([[3.0]], requires_grad=True)
    with hookrun.hooked(model, capture("b")) as hooks:
        model["b"](x, x).sum().backward()
    first, second = hooks.captures["h"]["b"][0]["grad_input"]
    assert torch.equal(first + second, x.grad)
    assert first.item() == second.item() != 0


def test_an_output_that_is_not_used_has_no_gradient() -> None:
    model = nn.ModuleDict({"add": Add()})
    x = torch.tensor(3.0, requires_grad=True)
    with hookrun.hooked(model, capture("add", hook="backward_pre")) as hooks:
        model["add"](x, other=torch.tensor(5.0))["sum"].backward()
    assert hooks.captures["h"]["add"] == [{"sum": torch.tensor(1.0), "product": None}]
