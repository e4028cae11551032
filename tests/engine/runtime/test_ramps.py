"""A number that follows the clock is what a hand-written schedule gives at each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draws import normal
from torch import Tensor, nn

import hookrun
from hookrun.engine.plan.plan import unexportable
from hookrun.errors import CompileError, SpecError

INPUT = normal(3, 4)
STEPS = range(7)
RAMP = {"from": 0.5, "to": -2, "steps": [1, 5]}


def number(step: int) -> float:
    return 0.5 if step <= 1 else -2.0 if step >= 5 else 0.5 - 2.5 * (step - 1) / 4


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def compiled(net: nn.Module, **keys: Any) -> Any:
    return hookrun.compile({"h": {"select": "0", "hook": "forward", **keys}}, net, example=((INPUT,), {}))


ACTIONS: dict[str, tuple[dict[str, Any], Callable[[Tensor, float], Tensor]]] = {
    "scale": ({"factor": RAMP}, lambda x, now: x * now),
    "add_bias": ({"value": RAMP}, lambda x, now: x + now),
    "replace": ({"value": RAMP}, lambda x, now: torch.full_like(x, now)),
    "clamp": ({"max": RAMP}, lambda x, now: x.clamp(max=now)),
    "wide": ({"action": "clamp", "min": {**RAMP, "from": -1e6}}, lambda x, now: x.clamp(min=-1e6)),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_the_value_at_each_step_is_that_of_a_hand_written_hook(name: str) -> None:
    keys, by_hand = ACTIONS[name]
    net = model()
    with compiled(net, **{"action": name, **keys}).install(net) as hooks:
        for step in STEPS if name != "wide" else (0,):
            torch.testing.assert_close(net(INPUT), net[1](by_hand(plain(net), number(step))))
            hooks.step()


def plain(net: nn.Sequential) -> Tensor:
    return nn.functional.linear(INPUT, net[0].weight, net[0].bias)


@pytest.mark.parametrize("kind", ["gaussian", "uniform", "multiplicative"])
def test_noise_takes_the_deviation_of_the_step(kind: str) -> None:
    net = model()
    outputs = []
    for std in ({"from": 0, "to": 1, "steps": [0, 4]}, 0.75):
        with compiled(net, action="noise", kind=kind, std=std, seed=3).install(net) as hooks:
            hooks.clock.step = 3
            outputs.append(net(INPUT))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", ACTIONS)
def test_a_graph_with_a_ramp_is_compiled_once(name: str) -> None:
    net = model()
    graphs = list[Any]()

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with compiled(net, **{"action": name, **ACTIONS[name][0]}).install(net) as hooks:
        net(INPUT)  # at the first call the hooks note that the model runs
        function = hooks.compile(backend=backend, fullgraph=True)
        for _ in STEPS:
            assert torch.equal(function(INPUT), net(INPUT))
            hooks.step()
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"action": "scale", "factor": {**RAMP, "steps": [5, 5]}}, "not after the first one"),
        ({"action": "scale", "factor": {"from": 0, "to": 1}}, "steps: is missing"),
        ({"action": "noise", "std": RAMP}, "no number below 0"),
        ({"action": "clamp", "min": 0, "max": RAMP}, "min 0.0 is greater than max -2.0"),
        ({"action": "project", "direction": RAMP}, "found the number"),
        ({"action": "add_bias", "value": RAMP, "trainable": True}, "h.value: .*once, at installation"),
        ({"action": "fill", "hook": "apply", "value": RAMP}, "h.value: .*once, at installation"),
    ],
)
def test_a_number_that_cannot_follow_the_clock_is_refused(keys: dict[str, Any], text: str) -> None:
    with pytest.raises((SpecError, CompileError), match=text):
        compiled(model(), **keys)


def test_an_export_refuses_a_ramp() -> None:
    plan = compiled(model(), action="scale", factor=RAMP)
    assert "factor=0.5 to -2 over steps 1 to 5" in str(plan)
    (problem,) = unexportable(plan)
    assert problem.where == "hooks.h.factor"
    assert "no step" in problem.what
