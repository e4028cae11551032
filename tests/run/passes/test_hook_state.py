"""The state of hooks between two steps is saved, and hooks that load it act as the original ones would have."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hooking import one_hook
from torch import Tensor, nn

import hookrun
from hookrun.engine.runtime import Installation
from hookrun.errors import HookrunError
from hookrun.run.passes.sink import RunSink
from hookrun.store.run_dir import RunDir

SPEC: dict[str, Any] = {
    "noisy": {"select": "0", "hook": "forward", "action": "noise", "std": 0.5},
    "at_times": one_hook("3", "forward", "scale", factor=2.0, when={"probability": 0.5})["h"],
    "gradient_noise": {"select": "**", "hook": "grad", "action": "noise", "when": {"probability": 0.7}},
    "early": one_hook("1", "forward", "stats", when={"step": [1, 2, 5], "epoch": [0, 1]})["h"],
    "clipped": one_hook("0.weight", "optimizer_step_pre", "clamp", min=-0.01, max=0.01)["h"],
    "first_only": one_hook("2", "forward", "stats", of=["mean", "bytes"], when={"call": 0})["h"],
    "some": {"select": "2", "hook": "forward", "action": "capture", "keep": {"reservoir": 9}},
    "few": {"select": "**", "hook": "output_grad", "action": "capture", "max_bytes": 150},
    "warned": {"select": "3", "hook": "forward", "action": "check", "max": 0.1, "policy": "warn"},
    "stops": {"select": "3", "hook": "forward", "action": "check", "max": 1e3, "policy": "stop"},
    "filled": {"select": "3", "hook": "apply", "action": "fill", "value": 0.25},
    "steered": {"select": "1", "hook": "forward", "action": "add_bias", "value": 0.1, "trainable": True},
}
STEPS = 7


def test_a_loop_may_be_resumed_from_any_step(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "whole", SPEC)
    for number in range(STEPS):
        loop.step(number)
    expected = loop.end()
    seen = loop.seen
    assert any("max_bytes are used up" in text for text in loop.said)
    assert 0 < expected["fired"]["at_times", "3"] < STEPS
    assert 0 < expected["fired"]["gradient_noise", "0.weight"] < STEPS
    for cut in (0, 1, 2, 4, 6, STEPS):
        first = Loop(tmp_path / str(cut), SPEC)
        for number in range(cut):
            first.step(number)
        state = first.state()
        said = list(first.said)
        assert plain(state["hooks"])
        assert plain(state["files"])
        assert first.state()["hooks"] == state["hooks"], "looking changes nothing"
        for number in range(cut, min(cut + 2, STEPS)):
            first.step(number)
        first.end()
        again = Loop(tmp_path / str(cut), SPEC, state)
        for number in range(cut, STEPS):
            again.step(number)
        assert all(map(torch.equal, again.seen, seen[cut:]))
        assert again.end() == expected
        assert len([text for text in said + again.said if "max_bytes" in text]) == 1, "told once"


def test_steps_of_the_optimizer_or_counted_by_hand_continue(tmp_path: Path) -> None:
    spec = {"seen": {"select": "0", "hook": "forward", "action": "stats"}}
    for by_hand in (False, True):
        model = net()
        plan = hookrun.compile(spec, model)
        optimizer = torch.optim.SGD(model.parameters())
        state: dict[str, Any] | None = None
        steps = list[int]()
        for _ in range(3):
            with plan.install(model) as hooks:
                if state is not None:
                    hooks.load_state_dict(state)
                for _ in range(2):
                    model(torch.ones(2, 3)).sum().backward()
                    optimizer.step()
                    if by_hand:
                        hooks.step()
                steps += [record["step"] for record in hooks.records]
                state = hooks.state_dict()
        assert steps == list(range(6))
        assert state is not None
        assert state["sites"]["seen"]["0"]["fired"] == 6


def test_counts_inside_compiled_graphs_continue() -> None:
    model = net().eval()
    plan = hookrun.compile({"s": {"select": "1", "hook": "forward", "action": "scale", "factor": 2.0}}, model)
    with plan.install(model) as hooks:
        state = hooks.state_dict()
        state["sites"]["s"]["1"]["in_graphs"] = 4
        hooks.load_state_dict(state)
        assert hooks.fired["s", "1"] == 4
        compiled = hooks.compile(backend="eager")
        compiled(torch.ones(2, 3))
        with pytest.raises(ZeroDivisionError), hooks.uncounted():
            compiled(torch.ones(2, 3))
            raise ZeroDivisionError
        assert hooks.fired["s", "1"] == 5
        assert hooks.state_dict()["sites"]["s"]["1"]["in_graphs"] == 5


def test_a_state_of_another_plan_is_refused_with_the_difference() -> None:
    model = net()
    spec = {"a": {"select": "0", "hook": "forward", "action": "noise", "std": 0.1}}
    others = {
        "only the state has a on 0\n  only the plan has b on 0": {"b": spec["a"]},
        "only the plan has a on 1": {"a": {**spec["a"], "select": ["0", "1"]}},
        "hooks of the same names have other settings: plan": {"a": {**spec["a"], "std": 0.2}},
    }
    with hookrun.compile(spec, model).install(model) as hooks:
        model(torch.ones(2, 3))
        state = hooks.state_dict()
    for message, other in others.items():
        with hookrun.compile(other, model).install(model) as hooks:
            with pytest.raises(HookrunError) as caught:
                hooks.load_state_dict(state)
            assert message in str(caught.value)
            assert "use the hooks, the model" in str(caught.value)
            hooks.load_state_dict(state, strict=False)
            assert [hooks.fired[each] for each in hooks.fired if each == ("a", "0")] in ([], [1])
            model(torch.ones(2, 3))


class Smoothed:
    """A user's function with a state: the mean of all values seen."""

    def __init__(self) -> None:
        self.count, self.mean = 0, torch.zeros(())

    def __call__(self, x: Tensor) -> Tensor:
        self.count += 1
        self.mean = self.mean + (x.detach().mean() - self.mean) / self.count
        return x - self.mean

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.mean = state["count"], state["mean"]


def test_a_user_s_object_with_a_state_continues() -> None:
    def outputs(numbers: range, state: dict[str, Any] | None = None) -> tuple[list[Tensor], dict[str, Any]]:
        model = net().eval()
        plan = hookrun.compile(
            {"s": {"select": "0", "hook": "forward", "action": "python", "function": Smoothed}}, model
        )
        with plan.install(model) as hooks, torch.no_grad():
            if state is not None:
                hooks.load_state_dict(state)
            return [model(torch.full((2, 3), float(number))) for number in numbers], hooks.state_dict()

    expected, last = outputs(range(5))
    _, state = outputs(range(2))
    found, end = outputs(range(2, 5), copy.deepcopy(state))
    assert all(map(torch.equal, found, expected[2:]))
    assert end == last
    assert last["sites"]["s"]["0"]["held"][0]["count"] == 5
    with pytest.raises(
        hookrun.HookError, match=r"hook 's' \(forward, python\) on 0: Smoothed.load_state_dict failed"
    ):
        broken = copy.deepcopy(state)
        broken["sites"]["s"]["0"]["held"] = [{}]
        outputs(range(1), broken)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Loop:
    """A user's small loop, under a sink that writes to `path`."""

    def __init__(self, path: Path, spec: dict[str, Any], before: dict[str, Any] | None = None) -> None:
        self.model = net()
        self.hooks, self.seen = None, list[Tensor]()
        plan = hookrun.compile(spec, self.model)
        self.run_dir = RunDir.create(path) if before is None else RunDir.reopen(path, before["files"])
        self.said = list[str]()
        sink = RunSink(self.run_dir, self.said.append)
        self.hooks = Installation(plan, self.model, sink=sink, effects=True)
        self.hooks.__enter__()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001, momentum=0.9)
        if before is not None:
            self.model.load_state_dict(before["model"])
            self.optimizer.load_state_dict(before["optimizer"])
            self.hooks.load_state_dict(before["hooks"])

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        self.hooks.samples, self.hooks.population = torch.arange(4) + 4 * number, 4 * STEPS
        self.hooks.sink.split = "train"
        self.optimizer.zero_grad()
        output = self.model(torch.randn(4, 3, generator=generator))
        output.square().sum().backward()
        self.optimizer.step()
        self.seen.append(output.detach())
        self.hooks.step()
        if number == 3:
            self.hooks.epoch()

    def state(self) -> dict[str, Any]:
        hooks = self.hooks.state_dict()
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return copy.deepcopy({"hooks": hooks, "files": self.run_dir.position(), **parts})

    def end(self) -> dict[str, Any]:
        stopped = self.hooks.stopped
        self.hooks.__exit__(None, None, None)
        counts = dict(self.run_dir.captures.counts)
        self.run_dir.close()
        self.run_dir.set_status("done")
        run = hookrun.open_run(self.run_dir.path)
        columns = ("sample_ids", "steps", "calls")
        rows = {
            (hook, module): [each[:].tolist(), *(getattr(each, name).tolist() for name in columns)]
            for hook, modules in run.captures.items()
            for module, each in modules.items()
        }
        return {
            "rows": rows, "counts": counts, "records": run.stats, "fired": dict(self.hooks.fired),
            "effects": self.hooks.effects, "inactive": self.hooks.inactive, "bytes": self.hooks.sink.bytes,
            "stopped": stopped,
            "weights": {name: value.tolist() for name, value in self.model.state_dict().items()},
        }  # fmt: skip


def plain(value: Any) -> bool:
    """Whether a state can be written without pickle."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(plain, value))
    return value is None or type(value) in (bool, int, float, str, Tensor)
