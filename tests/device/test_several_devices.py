"""A model whose parts are on several devices: hooks do on each of them what they do on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from joint_outcomes import assert_equal, refusal, tensors_of, trained
from joint_table import Row, rows
from run_files import numbers_of
from torch import Tensor, nn

import hookrun
from hookrun.run.passes.resuming import load_model, model_state
from hookrun.store.reader import Run


class Piped(nn.Module):
    """Two stages, each on its device, by hand."""

    def __init__(self, first: str = "cpu", then: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.b = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)
        self.first, self.then = torch.device(first), torch.device(then)
        self.placed()

    def placed(self) -> Piped:
        self.a.to(self.first)
        self.b.to(self.then)
        self.head.to(self.then)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Piped:
        return self  # each part stays where it is

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x.to(self.first))
        found: Tensor = self.head(self.b(hidden.to(self.then)))
        return found


ON_BOTH = ["a.0", "b.0"]
BY_VALUE = {"when": {"value": {"of": "mean", "above": 0}}}


def spec_of(row: Row, **keys: Any) -> dict[str, dict[str, Any]]:
    return {"h": {**row.spec["h"], "select": ON_BOTH, **keys}}


DRAWS_NOTHING = [row for row in rows() if row.action != "noise" and row.select == "block.0"]
BY_SAMPLE = [
    row
    for row in DRAWS_NOTHING
    if row.hook == "forward" and refusal(spec_of(row, **BY_VALUE), Piped()) is None
]


@pytest.mark.parametrize("row", DRAWS_NOTHING, ids=lambda row: f"{row.action}-{row.hook}")
def test_a_hook_on_both_stages_does_the_same_as_on_the_cpu(row: Row, device: torch.device) -> None:
    spec = spec_of(row)
    found = trained(Piped("cpu", device.type), spec, "cpu")
    assert len({module for _, module in found["fired"]}) > (row.hook[:9] == "optimizer")
    assert_equal(found, trained(Piped(), spec, "cpu"))


@pytest.mark.parametrize("row", BY_SAMPLE, ids=lambda row: row.action)
def test_each_stage_chooses_its_samples(row: Row, device: torch.device) -> None:
    spec = spec_of(row, **BY_VALUE)
    assert_equal(trained(Piped(device.type, "cpu"), spec, "cpu"), trained(Piped(), spec, "cpu"))


@pytest.mark.parametrize("per", ["all", "module", "tensor"])
@pytest.mark.parametrize("norm_type", [2, "inf"])
def test_a_common_norm_is_that_of_torch_over_all_devices(
    per: str, norm_type: Any, device: torch.device
) -> None:
    def stepped(where: str) -> dict[str, Any]:
        hook = {"select": "**", "hook": "optimizer_step_pre", "action": "clip_norm", "max_norm": 0.01}
        return trained(
            Piped("cpu", where), {"h": {**hook, "per": per, "norm_type": norm_type}}, "cpu", steps=1
        )

    found = stepped(device.type)
    assert_equal(found, stepped("cpu"))
    if per == "all":
        model = Piped()
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=float(norm_type))
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        assert_equal(found["weights"], dict(model.named_parameters()))


def test_a_value_of_a_stage_is_taken_over_to_the_other_one(device: torch.device) -> None:
    x = torch.randn(5, 8)
    hooks = {
        "seen": {"select": "a", "hook": "forward", "action": "capture"},
        "put": {
            "select": "b",
            "hook": "forward",
            "action": "replace",
            "value": {"hook": "seen", "module": "a"},
        },
    }
    model = Piped("cpu", device.type)
    with hookrun.hooked(model, hooks):
        out = model(x)
    expected = Piped()
    torch.testing.assert_close(out.cpu(), expected.head(expected.a(x)))


@pytest.mark.parametrize("mapped", ["stages", "offloaded"])
def test_accelerate_moves_values_between_hooks(mapped: str, device: torch.device) -> None:
    accelerate = pytest.importorskip("accelerate")
    x = torch.randn(5, 8)
    hooks = {
        "half": {"select": ["0", "2"], "hook": "forward", "action": "scale", "factor": 0.5},
        "more": {"select": "2", "hook": "forward", "action": "add_bias", "value": [1.0, 2.0, 3.0]},
        "seen": {"select": ["0", "2"], "hook": "forward", "action": "capture"},
    }
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    with hookrun.hooked(model, hooks) as installed, torch.no_grad():
        expected = model(x)
        kept = tensors_of(installed.captures)
    if mapped == "stages":
        accelerate.dispatch_model(model, {"0": "cpu", "1": device.type, "2": device.type})
    else:
        accelerate.cpu_offload(model, execution_device=device)
    with hookrun.hooked(model, hooks) as installed, torch.no_grad():
        assert_equal(model(x).cpu(), expected)
        assert_equal(tensors_of(installed.captures), kept)


STAGES = """
import os
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = "cpu", os.environ["THEN"]
        self.a = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU()).to(self.stages[0])
        self.b = nn.Linear(16, 10).to(self.stages[1])

    def forward(self, x):
        return self.b(self.a(x.to(self.stages[0])).to(self.stages[1]))


class Plain(Net):
    def __init__(self):
        super().__init__()
        self.to("cpu")

    def forward(self, x):
        return self.b(self.a(x))


def mapped():
    from accelerate import dispatch_model

    then = os.environ["THEN"]
    return Plain() if then == "cpu" else dispatch_model(Plain(), {"a": "cpu", "b": then})
"""
BOTH = (
    *("model=python", "model.factory=stages:Net", "data.batch_size=8", "train.limit_batches=3"),
    "+hooks.seen={select: [a, b], hook: forward, action: capture}",
    "+hooks.some={select: [a, b], hook: forward, action: scale, factor: 0.5, when: {data: {label: [3, 4]}}}",
    "+hooks.size={select: [a, b], hook: forward, action: stats}",
)
COMMANDS = {
    "train": (
        *BOTH,
        "train.checkpoint.save=last",
        "+hooks.bound={select: '**', hook: optimizer_step_pre, action: clip_norm, max_norm: 0.1}",
    ),
    "predict": (*BOTH, "task=predict"),
    "effects": (
        *BOTH[:4],
        *(
            "task=effects",
            "task.hook=all",
            "task.metric=loss",
            "task.over={module: [a, b], factor: [0.5, 2.0]}",
        ),
        "+hooks.all={select: [a, b], hook: forward, action: scale}",
    ),
}


@pytest.mark.parametrize("task", COMMANDS)
def test_a_run_leaves_the_stages_where_they_are(
    task: str,
    run: Callable[..., Run],
    device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys,
) -> None:
    monkeypatch.setenv("HOOKRUN_TRUST", "stages")
    (tmp_path / "stages.py").write_text(STAGES)
    monkeypatch.setenv("THEN", "cpu")
    expected = numbers_of(run(*COMMANDS[task], on="cpu"))
    assert "the model stays" not in capsys.readouterr().out
    monkeypatch.setenv("THEN", device.type)
    found = numbers_of(run(*COMMANDS[task]))
    said = " ".join(capsys.readouterr().out.split())
    assert (
        f"NOTE: the model stays where it is, on cpu and {device.type}:0; batches go to {device.type}" in said
    )
    assert_equal(found, expected, tolerance=1e-4)


def test_a_run_leaves_a_device_map_of_accelerate_as_it_is(
    run: Callable[..., Run], device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.setenv("HOOKRUN_TRUST", "stages")
    (tmp_path / "stages.py").write_text(STAGES)
    seen = "+hooks.seen={select: [a, b], hook: forward, action: capture, batch_dim: 0}"
    argv = (*BOTH[:4], "model.factory=stages:mapped", "task=predict", seen)
    monkeypatch.setenv("THEN", "cpu")
    expected = numbers_of(run(*argv, on="cpu"))
    monkeypatch.setenv("THEN", device.type)
    found = numbers_of(run(*argv))
    assert "the model stays where it is, on cpu and" in " ".join(capsys.readouterr().out.split())
    assert_equal(found, expected, tolerance=1e-4)


class Averaging(nn.Module):
    """Replaces its buffer by another tensor, of another shape, in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x)
        self.seen = found.detach().mean(0)
        return found


def test_a_buffer_returns_to_the_device_of_its_module(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Averaging())
    model[1].to(device)
    model[1](model[0](torch.randn(2, 4)).to(device))
    state = model_state(model, trains=False)
    again = nn.Sequential(nn.Linear(4, 4), Averaging())
    again[1].to(device)
    load_model(again, {"buffers": {name: each.cpu() for name, each in state["buffers"].items()}})
    assert again[1].seen.device.type == device.type
    assert torch.equal(again[1].seen.cpu(), model[1].seen.cpu())
