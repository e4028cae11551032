"""A copied or unpickled model, plan or result works; a copied model is not hooked, and writes into no records."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hooking import one_hook
from safetensors.torch import save_file
from small_nets import Net
from torch import Tensor, nn

import hookrun

X = torch.linspace(-1, 1, 6).reshape(2, 3)


def by_torch(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)  # type: ignore[no-any-return]


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "the oldest pickle": lambda value: pickle.loads(pickle.dumps(value, protocol=0)),
    "deep copy": copy.deepcopy,
    "copy": copy.copy,
}
WAYS = {"deepcopy": copy.deepcopy, "pickle": COPIES["pickle"], "torch.save": by_torch}
"""Those of a model."""


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_a_hooked_model_has_no_hooks(alone: dict[str, Any], way: str) -> None:
    model = net()
    with hookrun.hooked(model, {"h": {"select": "0", **alone}}) as hooks:
        other = WAYS[way](model)
        state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        before = dict(hooks.fired), len(hooks.records), repr(hooks.captures)
        found = step(other)
        assert (dict(hooks.fired), len(hooks.records), repr(hooks.captures)) == before
        step(model)
        assert before[0] != hooks.fired or alone["hook"] == "apply"
    plain = net()
    if alone["action"] == "add_parameter":
        plain[0].register_parameter("extra", nn.Parameter(torch.zeros(3)))
    plain.load_state_dict(state)
    assert torch.equal(found, plain(X)), "what the model computes without hooks"


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_a_hooked_model_can_be_hooked(way: str) -> None:
    model = net()
    spec = {
        "seen": {"select": "**", "hook": "forward", "action": "capture"},
        "double": {"select": "0", "hook": "forward", "action": "scale", "factor": 2},
    }
    with hookrun.hooked(model, spec) as hooks:
        other = WAYS[way](model)
        with hookrun.hooked(other, spec) as others:
            found = other(X)
        assert hooks.fired["double", "0"] == 0
        assert torch.equal(found, model(X))
    assert others.fired["double", "0"] == 1
    assert torch.equal(others.captures["seen"]["1"][0], hooks.captures["seen"]["1"][0])
    assert torch.equal(other(X), model(X))


def test_a_copy_made_in_the_middle_of_a_forward_is_not_hooked() -> None:
    model = net()
    copies: list[nn.Module] = []
    model[1].register_forward_hook(lambda *_: copies.append(copy.deepcopy(model)))
    spec = {
        "back": {"select": "**", "hook": "backward", "action": "capture"},
        "saved": {"select": "**", "hook": "saved_tensors", "action": "offload", "to": "cpu"},
        "out": {"select": "**", "hook": "forward", "action": "capture"},
    }
    with hookrun.hooked(model, spec) as hooks:
        model(X)
        fired = dict(hooks.fired)
        step(copies[0])
        assert hooks.fired == fired


HOOKS: dict[str, dict[str, Any]] = {
    "kept": {"select": "{0,2}", "hook": "forward", "action": "capture", "index": "..., 0", "when": {"step": [0, 1]}},
    "seen": {"select": ["re:\\d", "type:ReLU"], "hook": "forward", "action": "stats"},
    "never": {"select": "1", "hook": "forward", "action": "scale", "factor": 2.0, "when": {"mode": "eval"}},
    "clip": {
        "select": {"path": "**", "leaf": True, "exclude": "1"}, "hook": "grad", "action": "clip_norm", "max_norm": 1,
    },
    "bias": {"select": "0", "hook": "forward", "action": "add_bias", "value": [1.0, 2.0, 3.0], "trainable": True},
    "checked": {"select": "2", "hook": "forward", "action": "check", "policy": "warn", "max": 1e-9},
    "filled": {"select": "2", "hook": "apply", "action": "fill", "value": 0.5},
}  # fmt: skip


def same(first: Any, second: Any) -> bool:
    return str(first) == str(second) and first.hash == second.hash and first.to_dict() == second.to_dict()


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("example", [None, ((torch.ones(4, 3),), {})])
def test_a_pickled_or_copied_plan_is_equal(way: str, example: Any) -> None:
    model = net()
    plan = hookrun.compile(HOOKS, model, example=example)
    found = COPIES[way](plan)
    assert same(found, plan)
    str(plan), plan.hash, plan.hooks[0].aliases  # cached properties of the plan must not prevent pickling
    found = COPIES[way](plan)
    with found.install(model) as hooks:
        model(torch.ones(4, 3))
    assert hooks.fired["kept", "0"] == 1
    assert len(hooks.captures["kept"]["2"]) == 1


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with five samples, and a file of numbers beside it."""
    folder = tmp_path_factory.mktemp("values")
    save_file({"v": torch.ones(2)}, folder / "v.safetensors")
    model = net()
    with hookrun.record(model, one_hook("2"), folder / "run") as hooks:
        hooks.samples = range(5)
        model(torch.linspace(-1, 1, 15).reshape(5, 3))
    return folder


@pytest.mark.parametrize("way", COPIES)
def test_a_pickled_plan_keeps_values_from_files(way: str, recorded: Path) -> None:
    source = {"run": str(recorded / "run"), "capture": "h", "module": "2"}
    values = {"file": {"file": str(recorded / "v.safetensors")}}
    values |= {sample: {**source, "sample": sample} for sample in ("mean", "same", "resample")}
    model = net()
    hook = {"select": "2", "hook": "forward", "action": "add_bias"}
    plan = hookrun.compile({name: {**hook, "value": value} for name, value in values.items()}, model)
    found = COPIES[way](plan)
    assert same(found, plan)
    outputs = []
    for each in (plan, found):
        with each.install(model) as hooks, torch.no_grad():
            hooks.samples = [4, 2, 0]
            outputs.append(model(torch.zeros(3, 3)))
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], model(torch.zeros(3, 3)))


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", ["fired", "records", "captures", "inactive", "effects"])
def test_captures_can_be_pickled(way: str, name: str) -> None:
    body = net()
    model = Net(lambda m, x: m.body(x), body=body, again=body)
    scale = {"hook": "forward", "action": "scale", "factor": 2.0}
    spec = {
        "h": {"select": "body.0", "hook": "forward", "action": "capture"},
        "seen": {"select": "body.1", "hook": "forward", "action": "stats"},
        "never": {"select": "body.1", **scale, "when": {"mode": "eval"}},
        "doubled": {"select": "body.2", **scale},
    }
    with hookrun.hooked(model, spec, effects=True) as hooks:
        model(torch.ones(4, 3)).sum().backward()
        inside = COPIES[way](getattr(hooks, name))
    value = getattr(hooks, name)
    for found in (inside, COPIES[way](value)):
        assert type(found) is type(value)
        assert len(found) == len(value)
        if name == "fired":
            assert found == value
            assert found["h", "again.0"] == 1
        elif name == "captures":
            torch.testing.assert_close(found["h"]["body.0"], value["h"]["body.0"])
            assert found["h"]["again.0"][0].shape == (4, 3)
        else:
            assert found == value


@pytest.mark.parametrize("way", COPIES)
def test_hookruns_errors_can_be_pickled(way: str) -> None:
    for make in (
        lambda: hookrun.load_spec(one_hook("0", "nope")),
        lambda: hookrun.compile(one_hook("nope"), net()),
    ):
        with pytest.raises(hookrun.HookrunError) as error:
            make()
        found = COPIES[way](error.value)
        assert type(found) is type(error.value)
        assert str(found) == str(error.value)


def fired_in_a_process(plan: Any) -> Any:
    model = net()
    with plan.install(model) as hooks:
        model(torch.ones(4, 3))
    return hooks.fired, hooks.records


def test_counts_of_a_plan_come_back_from_a_process() -> None:
    plan = hookrun.compile(HOOKS, net())
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        ((fired, records),) = pool.map(fired_in_a_process, [plan])
    assert fired["kept", "0"] == 1
    assert {record["hook"] for record in records} == {"seen", "checked"}


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))


def step(model: nn.Module) -> Tensor | None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output = model(X.clone().requires_grad_())
    if output is None:  # a hook stops the forward
        return None
    output.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return output.detach()
