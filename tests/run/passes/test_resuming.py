"""A pass or an analysis that was cut off goes on where it was, and ends as an uninterrupted run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from run_files import recorded

import hookrun
from hookrun.cli import main
from hookrun.run.passes import resuming
from hookrun.run.passes.resuming import Results, Resuming
from hookrun.run.tasks.captured import cka
from hookrun.run.tasks.captured.cka import Way, linear_cka_of_all
from hookrun.run.tasks.captured.features import Features

BATCHES = 3
SMALL = ["compute=cpu", "compute.threads=1", "compute.capture_buffer=1", f"train.limit_batches={BATCHES}"]
HOOKS = [
    "+hooks.all={select: relu1, hook: forward, action: capture}",
    "+hooks.few={select: relu2, hook: forward, action: capture, keep: {reservoir: 40}}",
    "+hooks.bound={select: '**', hook: forward, action: capture, max_bytes: 700000}",
    "+hooks.noisy={select: conv1, hook: forward, action: noise, std: 0.5}",
    "+hooks.seldom={select: fc, hook: forward, action: scale, factor: 2, when: {probability: 0.5}}",
    "+hooks.grows={select: fc, hook: forward, action: scale, factor: {from: 1, to: 2, steps: [0, 3]}}",
    "+hooks.some={select: relu1, hook: forward, action: capture, when: {data: {label: [3, 4]}}}",
    "+hooks.other={select: fc, hook: forward, action: noise, when: {data: {class: '5'}}}",
    "+hooks.late={select: fc, hook: forward, action: stats, when: {step: {start: 1, every: 2}}}",
    "+hooks.warned={select: fc, hook: forward, action: check, max: 0.5, policy: warn}",
    "+hooks.shown={select: fc, hook: forward, action: print}",
    "+hooks.faulty={select: relu1, hook: forward, action: flip_bits, count: 3, bits: [20]}",
]
NAMES = ["model=decoder", "model.args.width=16", "model.args.length=48", "data=names", "data.batch_size=2"]
GENERATE = [
    *NAMES,
    *("task=generate", "task.without_hooks=true", "task.max_new_tokens=3", "task.sampling={top_k: 40}"),
    "+hooks.all={select: blocks.0, hook: forward, action: capture, tokens: {phase: generation}}",
    "+hooks.noisy={select: blocks.0, hook: forward, action: noise, std: 0.5, tokens: all}",
    "+hooks.seldom={select: blocks.1, hook: forward, action: scale, factor: 2, when: {probability: 0.5}}",
    "+hooks.late={select: blocks.1, hook: forward, action: stats, when: {step: {start: 1, every: 2}}}",
]
PREDICT = [
    *("task=predict", "task.split=all", "data.workers=2", "train.limit_batches=2"),
    "task.metrics=[loss,accuracy,{name: probability, by: sample},auroc,{name: f1, average: none}]",
    "+task.backward={score: top}",
    "+hooks.grads={select: relu1, hook: output_grad, action: capture}",
    "+hooks.weights={select: fc, hook: grad, action: noise}",
]
SCHEDULE = "train.scheduler={name: StepLR, step_size: 2, gamma: 0.5}"
OWN = "+hooks.own={select: fc, hook: forward, action: python, function: 'adapters:Adapter'}"
METRICS = "task.metrics=[loss,balanced_accuracy]"
TRAIN = ["task=train", METRICS, "train.epochs=3", "train.checkpoint.save=both", SCHEDULE, OWN]
EFFECTS = [
    *(
        "task=effects",
        "task.hook=all",
        "task.over={module: [relu1, relu2], factor: [0.5, 2.0]}",
        "task.metric=auroc",
    ),
    "+hooks.all={select: [relu1, relu2], hook: forward, action: scale}",
]
RUNS = {
    "evaluate": ([*HOOKS, "task=evaluate"], [(1, 1)]),
    "predict": ([*HOOKS, *PREDICT], [(1, 0), (2, 0)]),
    "attribute": ([*HOOKS, "task=attribute", "task.steps=2"], [(1, 1), (2, 0)]),
    "generate": (GENERATE, [(1, 1), (1, 0)]),
    "lens": ([*NAMES, "task=lens", HOOKS[0].replace("relu1", "blocks.0")], [(1, 1)]),
    "effects": (EFFECTS, [(2, 0), (1, 1)]),
    "train": ([*HOOKS, *TRAIN], [(BATCHES, 0), (1, 0), (4, 0)]),
}
"""What is typed, and each kill: the batch after which a state is saved, and how many batches later it comes.

A training is killed between its last step of an epoch and the epoch's schedule, where torch would warn of a schedule
that starts before the optimizer, in the validation that follows, and in the next epoch.
"""


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a command line that saves a state after its n-th batch, and is killed there or `later` batches after it."""

    def killed(*argv: str, after: int, later: int) -> None:
        passed = [0]
        real = Resuming.point

        def point(self: Any, due: bool = False, **options: bool) -> None:
            passed[0] += 1
            real(self, passed[0] == after)
            if passed[0] == after + later:
                raise Killed

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Resuming, "point", point)
            main([*argv])

    return killed


@pytest.mark.parametrize("task", RUNS)
def test_a_resumed_run_ends_as_a_whole_one(task: str, tmp_path, own_model, trusted, killed, capsys) -> None:
    argv, kills = RUNS[task]
    trusted(adapters=ADAPTER)
    argv = [*SMALL, *argv, *(own_model(DROPPING) if task == "train" else ())]
    assert main([*argv, "hydra.run.dir=whole"]) == 0
    summary = end_of(capsys.readouterr().out)
    expected = recorded(hookrun.open_run(tmp_path / "whole"))
    typed = [*argv, "hydra.run.dir=run"]
    for after, later in kills:
        killed(*typed, after=after, later=later)
        assert hookrun.open_run(tmp_path / "run").status["status"] != "done"
        typed = ["resume=run"]
    capsys.readouterr()
    assert main(typed) == 0
    said = capsys.readouterr().out
    assert "resumed from state_" in said
    assert recorded(hookrun.open_run(tmp_path / "run")) == expected
    assert end_of(said).replace("/run", "/whole") == summary


def end_of(said: str) -> str:
    """The printed lines on each hook at the end of a run."""
    return said[said.index("all (forward, ") :]


def killing(saved: list[dict[str, Any]], after: int) -> Callable[[dict[str, Any]], None]:
    """Saves, and kills the process after so many states."""

    def save(found: dict[str, Any]) -> None:
        saved.append(copy.deepcopy(found))
        if len(saved) == after:
            raise Killed

    return save


def test_a_comparison_is_resumed_at_the_next_row_of_tiles(monkeypatch) -> None:
    monkeypatch.setattr(resuming, "SECONDS", 0.0)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(50, width, generator=generator) for width in (3, 8, 5)]
    features = [Features(str(number), each, block_bytes=2**20) for number, each in enumerate(rows)]
    way = Way(by_features=False, tile=16, needed=0)
    expected = linear_cka_of_all(features, way)
    computed = list[int]()
    real = cka.gram
    monkeypatch.setattr(cka, "gram", lambda *args: computed.append(0) or real(*args))
    states = list[dict[str, Any]]()
    assert torch.equal(linear_cka_of_all(features, way, Results(save=killing(states, 0))), expected)
    whole = len(computed)
    assert len(states) == 5, "four rows of tiles, and the products"
    for after in range(1, 6):
        states = []
        with pytest.raises(Killed):
            linear_cka_of_all(features, way, Results(save=killing(states, after)))
        computed.clear()
        assert torch.equal(linear_cka_of_all(features, way, Results(states[-1])), expected)
        assert len(computed) < whole - 3 * after
    assert not computed, "the products were there"


def test_states_that_take_long_to_save_are_saved_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(resuming.time, "monotonic", lambda: now[0])

    def saves(cost: float) -> int:
        count = [0]

        def save(found: dict[str, Any]) -> None:
            count[0] += 1
            now[0] += cost

        made = Results(save=save)
        for number in range(100):
            now[0] += 1.0
            made.add(str(number), number)
        return count[0]

    assert saves(0.01) == 100
    assert saves(2.0) == 5
    made = Results({"a": 1}, save=lambda found: pytest.fail("not due"))
    made.add("b", 2, is_whole=False)
    assert made.get("a") == 1
    assert made.get("b") == 2
    assert made.get("c") is None


DROPPING = """
def __init__(self):
    super().__init__()
    self.conv1, self.relu1, self.relu2 = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.ReLU()
    self.drop, self.fc = nn.Dropout(), nn.Linear(144, 10)

def forward(self, x):
    return self.fc(self.drop(self.relu2(self.relu1(self.conv1(x))).flatten(1)))
"""
"""A network that draws from the generator of the process."""


ADAPTER = """
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal

class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.change, self.norm = orthogonal(nn.Linear(10, 10)), nn.BatchNorm1d(10)
        self.register_buffer("mean", torch.zeros(10))

    def forward(self, value, context):
        context.record("mean", value.mean())
        self.mean = 0.9 * self.mean + value.detach().mean(0)  # another tensor
        return value + self.norm(self.change(value)) + self.mean
"""
"""A module of the user's own that a hook adds: it is trained, has buffers, and records."""


class Killed(BaseException):
    """Raised where the process is killed."""
