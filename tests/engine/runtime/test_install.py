"""Schedules, effects, records, added parameters, and training with what was made under inference mode."""

from __future__ import annotations

import copy
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hooking import one_hook
from torch import Tensor, nn

import hookrun
from hookrun.engine.runtime.clock import Clock, CurrentCall
from hookrun.engine.runtime.frames import call_frame
from hookrun.errors import HookError

# These set-ups contain hooks that do nothing; tests/semantics/test_never_fired.py tests the warning.
pytestmark = pytest.mark.filterwarnings("ignore::hookrun.HookrunWarning")

X = torch.linspace(-1, 1, 12).reshape(4, 3)


ON_FIRST: dict[str, dict[str, Any]] = {
    "list": {"action": "scale", "factor": [1, 2, 3, 4]},
    "tensor": {"action": "scale", "factor": torch.arange(4.0)},
    "bounds": {"action": "clamp", "min": [-0.1] * 4, "max": 1e30},
    "index": {"action": "scale", "factor": 2, "index": "..., [1, 3]"},
    "heads": {"action": "scale", "factor": 2, "heads": {"count": 2, "pick": [1]}},
    "trained": {"action": "add_bias", "value": [0.5] * 4, "trainable": True},
    "added": {
        "hook": "apply",
        "action": "add_parameter",
        "name": "extra",
        "shape": [4],
        "value": [1, 2, 3, 4],
    },
    "own function": {"action": "python", "function": lambda x, by: x * by, "args": {"by": torch.arange(4.0)}},
}


@pytest.mark.parametrize("name", ON_FIRST)
def test_what_inference_mode_made_serves_a_training_step(name: str) -> None:
    spec = {"h": {"select": "0", "hook": "forward", **ON_FIRST[name]}}

    def trained(*inside: str) -> list[Tensor]:
        """The weights after a step; what is named `inside` happens under inference mode."""
        model = net()
        with torch.inference_mode("compile" in inside):
            plan = hookrun.compile(spec, model, example=((X,), {}))
        installed = plan.install(model)
        with torch.inference_mode("install" in inside):
            installed.__enter__()
        if "validate" in inside:
            with torch.inference_mode():
                model.eval()(X)
        torch.manual_seed(1)
        step(model.train())
        installed.__exit__(None, None, None)
        return list(model.parameters())

    expected = trained()
    for inside in (["validate"], ["install", "validate"], ["compile"]):
        for found, parameter in zip(trained(*inside), expected, strict=True):
            assert torch.equal(found, parameter), inside


@pytest.mark.parametrize(
    ("when", "fired"),
    [
        ({"step": [0, 2]}, [0, 2]),
        ({"step": {"start": 1, "end": 4, "every": 2}}, [1, 3]),
        ({"epoch": 1}, [3, 4, 5]),
        ({"mode": "eval"}, [4, 5]),
        ({"mode": "train", "epoch": 1}, [3]),
    ],
    ids=str,
)
def test_the_schedule(when: dict[str, Any], fired: list[int]) -> None:
    model = nn.Sequential(nn.Identity())
    found = []
    with hookrun.hooked(
        model, {"h": {"select": "0", "hook": "forward", "action": "capture", "when": when}}
    ) as hooks:
        for number in range(6):
            model.train(number < 4)
            assert hooks.mode == ("train" if number < 4 else "eval")
            before = hooks.fired["h", "0"]
            model(X)
            if hooks.fired["h", "0"] > before:
                found.append(number)
            hooks.step()
            if number == 2:
                hooks.epoch()
    assert found == fired


def test_probability_repeats_with_its_own_generator() -> None:
    model = nn.Sequential(nn.Identity())

    def firings(seed: int) -> int:
        when = {"probability": 0.5, "seed": seed}
        spec = {"h": {"select": "0", "hook": "forward", "action": "capture", "when": when}}
        state = torch.get_rng_state()
        with hookrun.hooked(model, spec) as hooks:
            for _ in range(200):
                model(X)
        assert torch.equal(torch.get_rng_state(), state)
        return hooks.fired["h", "0"]

    assert 60 < firings(0) < 140
    assert firings(0) == firings(0)
    assert len({firings(seed) for seed in range(5)}) > 1


@pytest.mark.parametrize("effects", [False, True])
def test_probability_is_drawn_once_for_each_gradient_that_an_edit_gets(effects: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 2))

    def fired_after_each_backward(action: dict[str, Any]) -> list[int]:
        spec = {"h": {"select": "0.weight", "hook": "grad", "when": {"probability": 0.5}, **action}}
        with hookrun.compile({"hooks": spec}, model).install(model, effects=effects) as hooks:
            fired = list[int]()
            for _ in range(50):
                model(X).sum().backward()
                fired.append(hooks.fired["h", "0.weight"])
        return fired

    capture = fired_after_each_backward({"action": "capture"})
    assert fired_after_each_backward({"action": "scale", "factor": 2}) == capture


@pytest.mark.parametrize("kind", ["gaussian", "uniform", "multiplicative"])
def test_noise_repeats_with_its_seed(kind: str) -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    state = torch.get_rng_state()

    def noise(seed: int) -> list[Tensor]:
        with hookrun.hooked(model, one_hook("*", "forward", "noise", kind=kind, seed=seed)):
            return [module(torch.ones(5)) for module in model for _ in range(2)]

    first = noise(1)
    other = noise(2)
    assert all(map(torch.equal, first, noise(1)))
    assert len({str(tensor) for tensor in first + other}) == 8, "at each call, at each module, with each seed"
    assert torch.equal(torch.get_rng_state(), state)


def test_effects_are_counted_on_request() -> None:
    model = nn.Sequential(nn.Identity())
    spec = {"h": {"select": "0", "hook": "forward", "action": "clamp", "min": 0}}
    with hookrun.hooked(model, spec, effects=True) as hooks:
        model(torch.tensor([-1.0, 2.0, -3.0]))
    assert hooks.effects == {("h", "0"): (2, 3)}
    with hookrun.hooked(model, spec) as hooks:
        model(torch.tensor([-1.0]))
    assert hooks.effects == {}


def test_added_parameters_are_removed_on_request() -> None:
    model = net()
    spec = {
        "shift": {"select": "5", "hook": "forward", "action": "add_bias", "value": [1, 2], "trainable": True},
        "new": {"select": "0", "hook": "apply", "action": "add_parameter", "name": "extra", "shape": [2]},
    }
    keys = set(model.state_dict())
    with hookrun.hooked(model, spec) as hooks:
        assert {name for name, _ in hooks.named_parameters()} == {"5.shift_bias", "0.extra"}
        torch.optim.SGD(hooks.parameters(), lr=0.1)
        model(X).sum().backward()
        assert torch.equal(model[5].shift_bias.grad, torch.full((2,), 4.0))
    assert set(model.state_dict()) == keys | {"5.shift_bias", "0.extra"}
    with torch.no_grad():
        for added in (model[5].shift_bias, model[0].extra):
            added.fill_(7)
    for again in (model, copy.deepcopy(model)):
        with hookrun.hooked(again, spec) as hooks:
            assert all(added.eq(7).all() for added in hooks.parameters()), "what it has learned is kept"
            assert len(hooks.parameters()) == 2
    hooks.uninstall_parameters()
    hookrun.hooked(model, spec).uninstall_parameters()
    assert set(model.state_dict()) == keys


class OwnMethods(nn.Module):
    """Its methods have the names of torch's and mean something else."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def apply(self, rule: str, times: int) -> str:  # type: ignore[override]
        return rule * times

    def children(self) -> list[str]:  # type: ignore[override]
        return []

    def parameters(self) -> str:  # type: ignore[override]
        return "none"

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc(x)
        return output


@pytest.mark.parametrize("prefix", ["", "0."])
def test_a_model_s_own_apply_is_not_called(prefix: str) -> None:
    model = nn.Sequential(OwnMethods()) if prefix else OwnMethods()
    spec = {
        "zero": {"select": f"{prefix}fc", "hook": "apply", "action": "fill", "value": 0},
        "one": {"select": f"{prefix}fc", "hook": "forward", "action": "add_bias", "value": 1},
    }
    plan = hookrun.compile(spec, model, example=((torch.ones(3, 2),), {}))
    assert plan.unchecked is None
    with plan.install(model):
        assert torch.equal(model(torch.ones(3, 2)), torch.ones(3, 2))


def test_outside_of_a_call_it_is_the_caller_s_frame() -> None:
    assert call_frame().f_code.co_name == "test_outside_of_a_call_it_is_the_caller_s_frame"


def test_a_record_begins_with_the_name_of_its_hook() -> None:
    model = nn.Sequential(nn.Identity()).eval()
    spec = {"s": {"select": "0", "hook": "forward", "action": "stats", "of": "sum"}}
    with hookrun.hooked(model, spec) as hooks:
        hooks.step()
        model({"a": torch.ones(3)})
    assert hooks.records == [
        {
            **{"hook": "s", "module": "0", "path": hooks.records[0]["path"], "action": "stats"},
            **{"mode": "eval", "epoch": 0, "step": 1, "call": 0, "sum": 3.0},
        }
    ]
    assert "a" in hooks.records[0]["path"]


def test_threads_do_not_see_each_other_s_firing() -> None:
    state = CurrentCall("", Clock(nn.Identity()))
    seen = list[str]()
    state.at = "[0]"
    thread = Thread(target=lambda: seen.append(state.at))
    thread.start()
    thread.join()
    assert seen == [""]
    assert state.at == "[0]"


def test_keys_of_cross_attention_belong_to_the_encoder_s_tokens() -> None:
    current: Any = SimpleNamespace(encoder="of the encoder")
    clock: Any = Clock(nn.Identity())
    for path, expected in (
        ("decoder.0.encoder_attn.k_proj", "of the encoder"),
        ("decoder.0.encoder_attn.q_proj", current),
        ("0.attn.k_proj", current),
    ):
        now, clock.passes = CurrentCall(path, clock), None
        assert now.tokens is None, path
        clock.passes = SimpleNamespace(current=current)
        assert now.tokens == expected, path
        assert now.model_tokens is current, path


def test_a_complex_value_of_a_real_tensor_is_refused() -> None:
    value = torch.ones(2, dtype=torch.complex64)
    for given in (value, lambda x: x * 1j):
        spec = {"h": {"select": "", "hook": "forward", "action": "scale", "factor": given}}
        model = nn.Identity()
        with hookrun.hooked(model, spec), pytest.raises(HookError, match=r"'h' .* the value is complex"):
            model(torch.ones(2))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Dropout(0.2)
    return nn.Sequential(*first, nn.BatchNorm1d(4), nn.Identity(), nn.Linear(4, 2))


def step(model: nn.Module) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = model(X).square().sum()
    loss.backward()
    optimizer.step()
    return loss.detach()
