"""Plans and the results of installations can be pickled and deep-copied, for process pools, logs and notebooks."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import hookrun
from hookrun.cli import main
from hookrun.models.networks import CNN

WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "the oldest pickle": lambda value: pickle.loads(pickle.dumps(value, protocol=0)),
    "deep copy": copy.deepcopy,
    "copy": copy.copy,
}
HOOKS: dict[str, dict[str, Any]] = {
    "kept": {
        "select": "{0,2}",
        "hook": "forward",
        "action": "capture",
        "index": "..., 0",
        "when": {"step": [0, 1]},
    },
    "seen": {"select": ["re:\\d", "type:ReLU"], "hook": "forward", "action": "stats", "target": None},
    "never": {
        "select": "h[0:1]",
        "hook": "forward",
        "action": "scale",
        "factor": 2.0,
        "when": {"mode": "eval"},
    },
    "clip": {
        "select": {"path": "**", "leaf": True, "exclude": "1"},
        "hook": "grad",
        "action": "clip_norm",
        "max_norm": 1,
    },
    "bias": {
        "select": "0",
        "hook": "forward",
        "action": "add_bias",
        "value": [1.0, 2.0, 3.0],
        "trainable": True,
    },
    "checked": {"select": "2", "hook": "forward", "action": "check", "policy": "warn", "max": 1e-9},
    "filled": {"select": "2", "hook": "apply", "action": "fill", "value": 0.5},
}
HOOKS["seen"].pop("target")
HOOKS["never"]["select"] = "1"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))


def same(first: Any, second: Any) -> bool:
    return str(first) == str(second) and first.hash == second.hash and first.to_dict() == second.to_dict()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("example", [None, ((torch.ones(4, 3),), {})])
def test_a_pickled_or_copied_plan_is_equal(way: str, example: Any) -> None:
    model = net()
    plan = hookrun.compile(HOOKS, model, example=example)
    found = WAYS[way](plan)
    assert same(found, plan)
    str(plan), plan.hash, plan.hooks[0].aliases  # cached properties of the plan must not prevent pickling
    found = WAYS[way](plan)
    with found.install(model) as hooks:
        model(torch.ones(4, 3))
    assert hooks.fired["kept", "0"] == 1 and len(hooks.captures["kept"]["2"]) == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_pickled_plan_keeps_values_from_files_and_runs(way: str, tmp_path: Path) -> None:
    save_file({"v": torch.ones(10)}, tmp_path / "v.safetensors")
    folder = tmp_path / "run"
    model = CNN(1, (8, 8), 10)
    hook = "+hooks.h={select: fc, hook: forward, action: capture}"
    assert main(["task=predict", "model=cnn", "data=digits", hook, f"hydra.run.dir={folder}"]) == 0
    source = {"run": str(folder), "capture": "h", "module": "fc"}
    spec = {
        "file": {
            "select": "fc",
            "hook": "forward",
            "action": "add_bias",
            "value": {"file": str(tmp_path / "v.safetensors")},
        },
        "mean": {
            "select": "fc",
            "hook": "forward",
            "action": "replace",
            "value": {**source, "sample": "mean"},
        },
        "same": {
            "select": "fc",
            "hook": "forward",
            "action": "replace",
            "value": {**source, "sample": "same"},
        },
        "drawn": {
            "select": "fc",
            "hook": "forward",
            "action": "replace",
            "value": {**source, "sample": "resample"},
        },
    }
    plan = hookrun.compile(spec, model)
    found = WAYS[way](plan)
    assert same(found, plan)
    x = torch.zeros(3, 1, 8, 8)
    outputs = []
    for each in (plan, found):
        with each.install(model) as hooks, torch.no_grad():
            hooks.samples = [4, 2, 0]
            outputs.append(model(x))
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["fired", "records", "captures", "inactive", "effects"])
def test_captures_records_and_counts_can_be_pickled(way: str, name: str) -> None:
    model = Twice()
    with hookrun.compile(
        {"h": {"select": "body.0", "hook": "forward", "action": "capture"}, **under("body")}, model
    ).install(model, effects=True) as hooks:
        model(torch.ones(4, 3)).sum().backward()
        inside = WAYS[way](getattr(hooks, name))
    value = getattr(hooks, name)
    for found in (inside, WAYS[way](value)):
        assert type(found) is type(value) and len(found) == len(value)
        if name == "fired":
            assert found == value and found["h", "again.0"] == 1  # a module's other names too
        elif name == "captures":
            torch.testing.assert_close(found["h"]["body.0"], value["h"]["body.0"])
            assert found["h"]["again.0"][0].shape == (4, 3)
        else:
            assert found == value


class Twice(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.again = self.body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out


def under(prefix: str) -> dict[str, Any]:
    return {
        "seen": {"select": f"{prefix}.1", "hook": "forward", "action": "stats"},
        "never": {
            "select": f"{prefix}.1",
            "hook": "forward",
            "action": "scale",
            "factor": 2.0,
            "when": {"mode": "eval"},
        },
        "doubled": {"select": f"{prefix}.2", "hook": "forward", "action": "scale", "factor": 2.0},
    }


@pytest.mark.parametrize("way", WAYS)
def test_hookruns_errors_can_be_pickled(way: str) -> None:
    for make in (
        lambda: hookrun.load_spec({"h": {"select": "0", "hook": "nope", "action": "capture"}}),
        lambda: hookrun.compile({"h": {"select": "nope", "hook": "forward", "action": "capture"}}, net()),
    ):
        with pytest.raises(hookrun.HookrunError) as error:
            make()
        found = WAYS[way](error.value)
        assert type(found) is type(error.value) and str(found) == str(error.value)


def fired_in_a_process(plan: Any) -> Any:
    model = net()
    with plan.install(model) as hooks:
        model(torch.ones(4, 3))
    return hooks.fired, hooks.records


def test_a_plan_can_be_sent_to_a_process_and_its_counts_back() -> None:
    plan = hookrun.compile(HOOKS, net())
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        ((fired, records),) = pool.map(fired_in_a_process, [plan])
    assert fired["kept", "0"] == 1 and {record["hook"] for record in records} == {"seen", "checked"}
