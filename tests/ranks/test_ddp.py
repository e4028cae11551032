"""A run on two processes has the results of one: weights, metrics, gradients as hooks see them, captures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hookrun
from hookrun.cli import main
from hookrun.hook_types import HOOK_TYPES
from hookrun.store.captures.read import StoredCapture
from hookrun.store.reader import Run
from hookrun.store.verify import verify

SMALL = (
    "model=cnn",
    "data=digits",
    "compute.device=cpu",
    "compute.threads=1",
    "compute.timeout=60",
    "train.epochs=2",
    "train.limit_batches=3",
    "train.log_every=1",
    "train.optimizer={name: SGD, lr: 0.05}",
)
CLIP = "+hooks.clip={select: fc, hook: grad, action: clamp, min: -0.01, max: 0.01}"
LATE = "+hooks.late={select: conv2, hook: post_accumulate_grad, action: clamp, min: -0.001, max: 0.001}"
NORM = "+hooks.norm={select: conv1, hook: optimizer_step_pre, action: clip_norm, max_norm: 0.01}"
STATS = "+hooks.whole={select: fc.weight, hook: post_accumulate_grad, action: stats}"
ROWS = "+hooks.rows={select: fc, hook: forward, action: capture}"
GRADIENT = "+hooks.gradient={select: fc.bias, hook: grad, action: capture}"
OUTPUT = "+hooks.output={select: conv1, hook: output_grad, action: capture}"
NOISE = "+hooks.noise={select: relu1, hook: forward, action: noise, std: 0.1, when: {probability: 0.7}}"
SAVED = "+hooks.saved={select: conv2, hook: saved_tensors, action: stats, of: bytes}"
HOOKS = (SAVED, CLIP, LATE, NORM, STATS, NOISE, ROWS, GRADIENT, OUTPUT)


def in_one(cwd: Path, *argv: str) -> Run:
    assert main([*SMALL, *argv, "hydra.run.dir=one"]) == 0
    return hookrun.open_run(cwd / "one")


def in_two(workers: Any, cwd: Path, *argv: str) -> tuple[Run, list[str]]:
    ended = workers.run(cwd, *SMALL, *argv, "compute.strategy=ddp", "hydra.run.dir=two")
    assert ended.codes == [0, 0], ended.said
    return hookrun.open_run(cwd / "two"), ended.said


def of_hook(run: Run, name: str) -> list[dict[str, Any]]:
    return [line for line in run.stats if line["hook"] == name]


def test_training_with_hooks_on_everything(workers: Any, same: Any, cwd: Path, capsys: Any) -> None:
    """Micro-batches of 11 rows, so that one rank has 6 and the other 5; the last step has one of its two."""
    argv = (*HOOKS, "data.batch_size=11", "train.accumulate=2")
    one, (two, said) = in_one(cwd, *argv), in_two(workers, cwd, *argv)
    same.weights(one, two)
    same.metrics(one, two)
    same.rows(one, two)
    rows = two.captures["rows"]["fc"]
    assert isinstance(rows, StoredCapture) and rows.ranks.unique().tolist() == [0, 1]
    for line, other in zip(*(of_hook(run, "whole") for run in (one, two)), strict=True):
        same.line(line, other)
    assert said[1] == "" and "epoch 2/2" in said[0], "rank 0 alone speaks"
    told = [
        line
        for line in capsys.readouterr().out.splitlines()
        if any(word in line for word in ("changed", "fired", "captured", "counted"))
    ]
    assert told == [
        line
        for line in said[0].splitlines()
        if any(word in line for word in ("changed", "fired", "captured", "counted"))
    ]
    assert verify(two.path).bad == []


EVERY = {
    "started": "select: fc, hook: apply, action: fill, value: 0.02, parameters: [bias]",
    "inputs": "select: conv1, hook: forward_pre, action: scale, factor: 0.9",
    "added": "select: relu1, hook: forward, action: add_bias, value: 0.01, trainable: true",
    "clamped": "select: conv2, hook: forward, action: clamp, min: -1, max: 1",
    "replaced": "select: relu2, hook: forward, action: replace, value: 0.5, index: '..., 0'",
    "saved": "select: conv2, hook: saved_tensors, action: cast, dtype: bfloat16",
    "before": "select: relu2, hook: backward_pre, action: clamp, min: -0.00001, max: 0.00001",
    "after": "select: conv2, hook: backward, action: scale, factor: 0.5",
    "of_output": "select: fc, hook: output_grad, action: clamp, min: -0.002, max: 0.002",
    "noisy": "select: fc.weight, hook: grad, action: noise, std: 0.001",
    "clipped": "select: fc.weight, hook: grad, action: clip_norm, max_norm: 0.1, priority: 1",
    "doubled": "select: conv1, hook: post_accumulate_grad, action: scale, factor: 2",
    "pushed": "select: conv1, hook: optimizer_step_pre, action: add_bias, value: 0.001",
    "bounded": "select: fc.bias, hook: optimizer_step_post, action: clamp, min: -0.0201, max: 0.0201",
    "kept": "select: conv2, hook: backward, action: capture, target: 'grad_output[0]'",
    "checked": "select: relu1, hook: forward, action: check, policy: stop",
    "read": "select: conv1.weight, hook: weight, action: scale, factor: 0.8",
    "faulty": "select: relu1, hook: forward, action: flip_bits, count: 1, per: sample, bits: [20]",
}
"""A hook of every type, each with another action where there is one."""


def test_a_hook_of_every_type(workers: Any, same: Any, cwd: Path) -> None:
    argv = [f"+hooks.{name}={{{hook}}}" for name, hook in EVERY.items()]
    one = in_one(cwd, *argv, "data.batch_size=9")
    two, _ = in_two(workers, cwd, *argv, "data.batch_size=9")
    assert {hook["hook"] for hook in one.plan["hooks"]} == set(HOOK_TYPES), "every type is there"
    same.weights(one, two, atol=1e-5)
    same.metrics(one, two)
    same.rows(one, two)
    assert one.hooks == two.hooks, "as often, and as many elements changed"
    lists = [
        sorted((line["mode"], line["step"], line["element"], line["sample"]) for line in run.faults)
        for run in (one, two)
    ]
    assert lists[0] == lists[1] and {line["of_rank"] for line in two.faults} == {0, 1}


@pytest.mark.parametrize("size", [1, 9])
def test_conditions_numbers_and_values_of_the_same_pass(
    size: int, workers: Any, same: Any, cwd: Path
) -> None:
    argv = (
        "+hooks.few={select: fc, hook: forward, action: capture, when: {value: {of: max, above: 1.3}}}",
        "+hooks.grows={select: relu2, hook: forward, action: noise, std: {from: 0, to: 0.2, steps: [0, 4]}, "
        "when: {value: {of: mean, above: 0.05}}}",
        "+hooks.label={select: fc, hook: forward, action: capture, when: {data: {label: [0, 1, 2, 3, 4]}}}",
        "+hooks.odd={select: fc, hook: output_grad, action: scale, factor: 0.5, when: {data: {class: ['1', '7']}}}",
        "+hooks.source={select: conv1, hook: forward, action: capture}",
        "+hooks.patch={select: relu1, hook: forward, action: add_bias, value: {hook: source}}",
        f"data.batch_size={size}",
    )
    one, (two, _) = in_one(cwd, *argv), in_two(workers, cwd, *argv)
    same.weights(one, two, atol=1e-5)
    same.metrics(one, two)
    same.rows(one, two)
    every = len(one.captures["source"]["conv1"])
    assert all(0 < len(one.captures[name]["fc"]) < every for name in ("few", "label"))


OWN = """
import torch

class Adapter(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down, self.up = torch.nn.Linear(width, 2), torch.nn.Linear(2, width)

    def forward(self, value, context):
        context.record("mean", value.mean())
        return value + self.up(self.down(value).tanh())

def noisy(value, context):
    return value + torch.randn(value.shape, generator=context.generator(value))
"""


def test_an_own_module_is_trained_and_records_as_stats(workers: Any, same: Any, cwd: Path) -> None:
    """Batches of one row at the end: the second rank has none, and records nothing."""
    (cwd / "ranks_own.py").write_text(OWN)
    own = "+hooks.{}={{select: fc, hook: forward, action: python, function: 'ranks_own:{}', args: {}}}"
    trust = "+trust=[ranks_own]"
    argv = (
        trust, "data.batch_size=1", own.format("own", "Adapter", "{width: 10}"),
        "+hooks.whole={select: fc.own_down_weight, hook: grad, action: stats}",
        "+hooks.seen={select: fc, hook: forward, action: stats, of: mean, priority: -1}",
    )  # fmt: skip
    one, (two, said) = in_one(cwd, *argv), in_two(workers, cwd, *argv)
    same.weights(one, two)
    assert "own: your own function gets only a rank's own rows" in said[0]
    for line, other in zip(*(of_hook(run, "whole") for run in (one, two)), strict=True):
        same.line(line, other)
    for mine, theirs in zip(of_hook(two, "own"), of_hook(two, "seen"), strict=True):
        same.line({**theirs, "hook": "own", "action": "python"}, mine)
    ended = workers.run(cwd, *SMALL, trust, own.format("h", "noisy", "{}"), "compute.strategy=ddp")
    assert set(ended.codes) == {1} and "draws random numbers for the rows of a batch" in ended.said[0]


def test_a_rank_without_rows_takes_part(workers: Any, same: Any, cwd: Path) -> None:
    """Batches of one row: the second rank never has one; its missing records are not reported."""
    argv = (CLIP, LATE, NOISE, ROWS, "data.batch_size=1", "train.accumulate=2", "train.limit_batches=5")
    one, (two, _) = in_one(cwd, *argv), in_two(workers, cwd, *argv)
    same.weights(one, two)
    same.metrics(one, two)
    same.rows(one, two)


def test_predictions_and_gradients_without_training(workers: Any, same: Any, cwd: Path) -> None:
    """The 359 rows of the split in batches of 51: of the last one, of 2 rows, each rank has one."""
    argv = (
        "task=predict",
        "task.backward={score: label}",
        "data.batch_size=51",
        "train.limit_batches=null",
        ROWS,
        GRADIENT,
    )
    one, (two, _) = in_one(cwd, *argv), in_two(workers, cwd, *argv)
    assert isinstance(one.predictions, StoredCapture) and isinstance(two.predictions, StoredCapture)
    assert torch.equal(one.predictions.sample_ids, two.predictions.sample_ids)
    assert torch.allclose(one.predictions[:], two.predictions[:], atol=1e-6)
    same.rows(one, two)
    for line, other in zip(
        one.samples.lines, sorted(two.samples.lines, key=lambda line: int(line["sample"])), strict=True
    ):
        assert line == {**other, "loss": pytest.approx(other["loss"], rel=1e-4)}
    assert (one.path / "pictures.jsonl").read_text() == (two.path / "pictures.jsonl").read_text()
    assert one.metrics == two.metrics
