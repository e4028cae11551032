"""Parameters on the meta device, which the forward fills meanwhile: hooks on values stay right, others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draws import normal
from torch import Tensor, nn

import hookrun
from hookrun.errors import CompileError

X = normal(5, 4)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))


class Offloaded:
    """The forward of a module whose parameters lie elsewhere, as accelerate's AlignDevicesHook replaces it."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.forward = module, module.forward
        self.values = {name: parameter.detach() for name, parameter in module.named_parameters(recurse=False)}
        self.put({name: value.to("meta") for name, value in self.values.items()})
        module.forward = self  # type: ignore[assignment]

    def put(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self.module._parameters[name] = nn.Parameter(value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.put(self.values)
        output = self.forward(*args, **kwargs)
        self.put({name: value.to("meta") for name, value in self.values.items()})
        return output


def offloaded() -> nn.Module:
    model = network()
    for module in model.modules():
        Offloaded(module)
    return model


def offloaded_by_accelerate() -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    model: nn.Module = accelerate.cpu_offload(network(), execution_device="cpu")
    return model


MAKERS = [offloaded, offloaded_by_accelerate]


def hook(action: str, kind: str = "forward", select: str = "**", **keys: Any) -> dict[str, Any]:
    return {"select": select, "hook": kind, "action": action, **keys}


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    "observer",
    [
        hook("capture"),
        hook("capture", "forward_pre"),
        hook("stats"),
        hook("check", finite=True),
        hook("capture", select="0", when={"call": [0]}),
        hook("stats", "saved_tensors", of=["bytes"]),
        hook("capture", "output_grad", "2.0"),
    ],
)
def test_an_observer_leaves_the_gradient_as_it_is(
    make: Callable[[], nn.Module], observer: dict[str, Any]
) -> None:
    results = list[list[Tensor]]()
    for model, spec in ((network(), {}), (make(), {"h": observer})):
        x = X.clone().requires_grad_()
        with hookrun.hooked(model, spec) as hooks:
            output = model(x)
            output.square().sum().backward()
        assert not spec or sum(hooks.fired.values())
        assert x.grad is not None
        results.append([output, x.grad])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    "edit", [hook("scale", factor=2), hook("add_bias", value=1), hook("clamp", max=0.5), hook("noise", std=1)]
)
def test_an_edit_is_that_of_the_model_with_parameters(
    make: Callable[[], nn.Module], edit: dict[str, Any]
) -> None:
    outputs = list[Tensor]()
    for model in (network(), make()):
        with hookrun.hooked(model, {"h": edit}):
            outputs.append(model(X))
    assert torch.equal(*outputs)


def test_parameters_saved_for_backward_are_told_from_values() -> None:
    fired = list[dict[tuple[str, str], int]]()
    for make in (network, offloaded):
        model = make()
        with hookrun.hooked(model, {"h": hook("stats", "saved_tensors", of=["bytes"])}) as hooks:
            model(X)
        fired.append(dict(hooks.fired))
    assert fired[0] == fired[1]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("refused", "named"),
    [
        (hook("capture", "weight", "2.0"), "2.0.weight, 2.0.bias"),
        (hook("scale", "weight", "0.weight", factor=2), "0.weight"),
        (hook("freeze", "apply", "2"), "2"),
        (hook("prune", "apply", "0", amount=0.5), "0"),
        (hook("capture", "grad", "0"), "0.weight, 0.bias"),
        (hook("add_bias", select="2.1", value=0, trainable=True), "2.1"),
    ],
)
def test_a_hook_on_the_parameters_is_refused_by_name(
    make: Callable[[], nn.Module], refused: dict[str, Any], named: str
) -> None:
    model = make()
    with pytest.raises(CompileError) as error, hookrun.hooked(model, {"seen": hook("capture"), "h": refused}):
        pass
    (problem,) = error.value.errors
    assert problem.where == "hooks.h"
    assert f"the parameters of {named} lie on the meta device" in problem.what
    assert torch.equal(model(X), network()(X))


def test_a_parameter_in_place_can_be_hooked() -> None:
    model = network()
    Offloaded(model[2][0])
    with hookrun.hooked(model, {"h": hook("scale", "weight", "0.weight", factor=2)}):
        output = model(X)
    expected = network()
    with torch.no_grad():
        expected[0].weight.mul_(2)
    assert torch.equal(output, expected(X))


@pytest.mark.parametrize("make", MAKERS)
def test_a_trial_run_leaves_the_model_alone(make: Callable[[], nn.Module]) -> None:
    model = make()
    plan = hookrun.compile({"h": hook("capture")}, model, example=((X,), {}))
    assert plan.unchecked is not None
    assert plan.unchecked.startswith("0.weight lies on the meta device")
    for parameter in model.parameters():
        assert parameter.is_meta
    with plan.install(model) as hooks:
        assert torch.equal(model(X), network()(X))
    assert hooks.fired["h", "0"] == 1
