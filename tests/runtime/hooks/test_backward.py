"""`backward` and `backward_pre`, also where PyTorch's own full backward hooks fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
    return {"h": {"select": select, "hook": hook, "action": "capture", **more}}


def test_every_module_of_a_train_mode_network_with_in_place_operations_can_be_observed() -> None:
    model = net()
    plain = run(model)
    with hookrun.hooked(model, capture("**")) as hooks:
        found = run(model)
    for name, grad in plain.items():
        torch.testing.assert_close(found[name], grad)
    assert set(hooks.fired.values()) == {1}


def test_every_module_of_a_train_mode_resnet18_can_be_observed() -> None:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model = resnet18(num_classes=3)
    x = torch.randn(2, 3, 32, 32)

    def gradient() -> Tensor:
        model.zero_grad()
        model(x).square().sum().backward()
        return model.conv1.weight.grad.clone()

    plain = gradient()
    with hookrun.hooked(model, capture({"path": "**", "leaf": True})) as hooks:
        found = gradient()
    torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-4)
    assert min(hooks.fired.values()) == 1
    assert hooks.fired["h", "layer1.0.relu"] == 2, "the block calls it twice"


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
    with hookrun.hooked(model, {"h": {"select": "4", "hook": "backward", "action": "scale", "factor": 2}}):
        found = run(model)
    assert torch.equal(found["4.weight"], plain["4.weight"])
    torch.testing.assert_close(found["0.weight"], plain["0.weight"] * 2)


def test_backward_pre_edits_the_gradient_of_the_output() -> None:
    model = net()
    plain = run(model)
    with hookrun.hooked(
        model, {"h": {"select": "4", "hook": "backward_pre", "action": "scale", "factor": 2}}
    ):
        found = run(model)
    for name, grad in plain.items():
        torch.testing.assert_close(found[name], grad * 2)


def test_backward_sees_keyword_inputs_and_dict_outputs() -> None:
    model = nn.ModuleDict({"add": Add()})
    x, other = torch.tensor(3.0, requires_grad=True), torch.tensor(5.0, requires_grad=True)
    with hookrun.hooked(model, capture("add")) as hooks:
        out = model["add"](x, other=other)
        (out["sum"] + 10 * out["product"]).backward()
    (value,) = hooks.captures["h"]["add"]
    assert value["grad_input"] == {0: 51, "other": 31}
    assert value["grad_output"] == {"sum": 1, "product": 10}


def test_a_target_names_one_gradient() -> None:
    model = nn.ModuleDict({"add": Add()})
    x, other = torch.tensor(3.0, requires_grad=True), torch.tensor(5.0, requires_grad=True)
    spec = {"h": {"select": "add", "hook": "backward", "action": "replace", "value": 0, "target": "other"}}
    with hookrun.hooked(model, spec):
        model["add"](x, other=other)["sum"].backward()
    assert (x.grad, other.grad) == (1, 0)


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


def test_an_edit_of_gradients_that_are_none_is_reported() -> None:
    model = net()
    with hookrun.hooked(
        model, {"h": {"select": "0", "hook": "backward", "action": "scale", "factor": 2}}
    ) as hooks:
        run(model)
    assert hooks.inactive == [("h", "0", "fired and found no tensor for its action")]


def test_a_module_used_twice_fires_twice_with_numbered_calls() -> None:
    linear = nn.Linear(1, 1, bias=False)
    model = nn.Sequential(linear, linear)
    with hookrun.hooked(model, capture("0", when={"call": 1})) as hooks:
        model(torch.ones(1, 1, requires_grad=True)).sum().backward()
    (value,) = hooks.captures["h"]["0"]
    assert value["grad_output"].item() == 1, "the second call's output is the model's"


def test_backward_can_run_twice_through_one_graph() -> None:
    model = net()
    with hookrun.hooked(model, capture("1")) as hooks:
        loss = model(torch.ones(1, 1, 8, 8)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    first, second = hooks.captures["h"]["1"]
    assert torch.equal(first["grad_output"], second["grad_output"])


def test_second_derivatives_can_be_computed() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Tanh())
    x = torch.tensor([[0.5]], requires_grad=True)

    def second() -> Tensor:
        (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    plain = second()
    with hookrun.hooked(model, capture("*")):
        torch.testing.assert_close(second(), plain)


def test_no_node_is_added_without_gradients() -> None:
    model = net()
    with torch.no_grad(), hookrun.hooked(model, capture("**")) as hooks:
        out = model(torch.ones(1, 1, 8, 8))
    assert out.grad_fn is None
    assert {why for _, _, why in hooks.inactive} == {"never fired"}


@pytest.mark.parametrize("hook", ["backward", "output_grad", "backward_pre"])
def test_a_backward_after_removal_runs_no_hook(hook: str) -> None:
    model = net()
    with hookrun.hooked(model, capture("1", hook=hook)) as hooks:
        loss = model(torch.ones(1, 1, 8, 8)).sum()
    loss.backward()
    assert hooks.fired["h", "1"] == 0
    assert model[0].weight.grad is not None
