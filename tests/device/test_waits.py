"""Hooks and tasks stop the host no more often than they must: each wait and each upload is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookrun
from hookrun.cli import main
from hookrun.engine.values.tensors import read_together

second_device = pytest.importorskip("second_device")

RAMP = {"from": 1.0, "to": 2.0, "steps": [0, 10]}
BY_VALUE = {"when": {"value": {"of": "mean", "above": 0.0}}}
SMALL = {"min": -0.1, "max": 0.1}

ACTIONS: dict[str, tuple[dict[str, Any], int]] = {
    "stats": ({"action": "stats"}, 0),
    "stats with options": (
        {"action": "stats", "dim": 0, "of": [{"quantiles": [0.1]}, {"histogram": {"bins": 3}}]},
        0,
    ),
    "check that warns": ({"action": "check", "policy": "warn", "max": 0.1}, 0),
    "check that stops": ({"action": "check", "policy": "stop"}, 0),
    "check that raises": ({"action": "check"}, 1),
    "clamp": ({"action": "clamp", **SMALL}, 0),
    "clamp by a list": ({"action": "clamp", "min": [-0.1, -0.2, -0.3, -0.4]}, 0),
    "clamp beyond float16": ({"action": "clamp", "min": -1e6, "max": [1e6, 1.0, 2.0, 3.0]}, 0),
    "clamp by a ramp": ({"action": "clamp", "max": RAMP}, 0),
    "scale": ({"action": "scale", "factor": 0.5}, 0),
    "scale by a ramp": ({"action": "scale", "factor": RAMP}, 0),
    "scale by value": ({"action": "scale", "factor": 0.5, **BY_VALUE}, 0),
    "capture": ({"action": "capture"}, 0),
    "capture that keeps some": ({"action": "capture", "keep": {"every": 2}}, 0),
    "clip_norm": ({"action": "clip_norm", "max_norm": 0.1}, 0),
    "noise": ({"action": "noise", "std": 0.1}, 0),
    "add_bias": ({"action": "add_bias", "value": [0.1, 0.2, 0.3, 0.4]}, 0),
    "add_bias by a ramp": ({"action": "add_bias", "value": RAMP}, 0),
    "add_bias by value": ({"action": "add_bias", "value": 0.1, **BY_VALUE}, 0),
    "replace by a ramp": ({"action": "replace", "value": RAMP}, 0),
    "quantize": ({"action": "quantize", "bits": 4}, 0),
    "project": ({"action": "project", "direction": [1.0, 0.0, 0.0, 2.0]}, 0),
    "flip_bits": ({"action": "flip_bits", "count": 2, "bits": [18, 20]}, 1),
    # how many rows there are depends on the values
    "stats by value": ({"action": "stats", **BY_VALUE}, 1),
    "capture by value": ({"action": "capture", "keep": {"every": 2}, **BY_VALUE}, 1),
    "python by value": ({"action": "python", "function": "hookrun.examples:soften", **BY_VALUE}, 1),
}
"""What a hook does -> its action, and how often the host waits in a step."""


@pytest.mark.parametrize("name", ACTIONS)
def test_a_step_waits_no_more_than(name: str, device: torch.device) -> None:
    action, waits = ACTIONS[name]
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(6, 4).to(device)
    with hookrun.hooked(model, {"h": {"select": "0", "hook": "forward", **action}}) as hooks:
        for step in range(4):
            hooks.samples = torch.arange(6) + 6 * step
            with second_device.watch() as seen:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                hooks.step()
        assert hooks.fired["h", "0"] == 4
    assert (len(seen.waits), len(seen.uploads)) == (waits, 0), seen


def test_several_tensors_are_read_with_one_wait(device: torch.device) -> None:
    numbers = [torch.arange(3.0), torch.arange(4).view(2, 2), torch.tensor(True), torch.empty(0)]
    there = [*(each.to(device) for each in numbers), torch.ones(2)]
    with second_device.watch() as seen:
        read = read_together(there)
    assert len(seen.waits) == 1, seen
    for found, number in zip(read, [*numbers, torch.ones(2)], strict=True):
        assert found.is_cpu
        assert torch.equal(found, number)


TRAIN = ("model=mlp", "data=digits", "data.batch_size=4", "train.epochs=1", "train.log_every=100")
DECODER = ("model=decoder", "model.args.width=16", "model.args.heads=2", "data=names", "data.batch_size=3")
CUT = "+hooks.cut={select: fc, hook: forward, action: clamp, min: -1, max: 1}"
SOME = "when: {data: {label: [1, 2, 3]}}"
OF_SOME = (
    f"+hooks.half={{select: fc, hook: forward, action: scale, factor: 0.5, {SOME}}}",
    f"+hooks.seen={{select: fc, hook: forward, action: stats, {SOME}}}",
)

COMMANDS: dict[str, tuple[tuple[str, ...], int]] = {
    # once in training, and once in validation, for the predictions
    "train": ((*TRAIN, CUT), 2),
    "train in fp16": ((*TRAIN, CUT, "compute.precision=fp16"), 2),
    "evaluate": ((*TRAIN, CUT, "task=evaluate"), 1),
    "choose samples by their data": ((*TRAIN, *OF_SOME, "task=evaluate"), 1),
    # for the prompts, their lines in samples.jsonl, and each of two tokens
    "generate": ((*DECODER, "task=generate", "task.prompt_tokens=3", "task.max_new_tokens=2"), 4),
    # for the tokens, which choose the positions, and for what was read there
    "lens": ((*DECODER, "task=lens"), 2),
}
"""What a command does -> its words, and how often the host waits for each batch."""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_batch_waits_no_more_than(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words, waits = COMMANDS[name]
    found = list[second_device.Seen]()
    for batches in (4, 6):  # in the first steps the gradient scaler overflows
        with second_device.watch() as seen:
            command = (
                *words,
                f"train.limit_batches={batches}",
                "compute.device=second",
                f"hydra.run.dir=run{batches}",
            )
            assert main(list(command)) == 0
        found.append(seen)
    few, more = found
    assert len(more.waits) - len(few.waits) == 2 * waits, more
    of_hooks = [[where for _, where in seen.uploads if "batches.py" not in where] for seen in found]
    assert len(of_hooks[1]) <= len(of_hooks[0]), more
