"""A run on two processes has the results of one, with whole parameters (ddp) and with sharded ones (fsdp)."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from run_files import weights

import hookrun
from hookrun.cli import main
from hookrun.engine.hook_types import HOOK_TYPES
from hookrun.store.captures.read import StoredCapture
from hookrun.store.reader import Run
from hookrun.store.verify import verify

SMALL = (
    "model=cnn", "data=digits", "compute.device=cpu", "compute.threads=1", "compute.timeout=60", "train.epochs=2",
    "train.limit_batches=3", "train.log_every=2", "train.optimizer={name: SGD, lr: 0.05}",
)  # fmt: skip
STRATEGIES = {
    "ddp": ("compute.strategy=ddp",),
    "fsdp": ("compute=fsdp", "compute.device=cpu", "compute.fsdp.wrap='{conv2,fc}'"),
}


def test_training_with_hooks_on_everything(workers: Any, same: Any, cwd: Path, capsys: Any) -> None:
    """Micro-batches of 11 rows, of which one rank has 6 and the other 5; steps of two, and an average of weights."""
    more = ("data.batch_size=11", "train.accumulate=2", "train.ema={decay: 0.5}", "train.clip_grad_norm=1")
    argv = (*entries(HOOKS | CONDITIONS), *more)
    one = in_one(cwd, *argv)
    assert {hook["hook"] for hook in one.plan["hooks"]} == set(HOOK_TYPES), "every type is there"
    every = len(one.captures["source"]["conv1"])
    for name in ("high", "label"):
        assert 0 < len(one.captures[name]["fc"]) < every
    printed = capsys.readouterr().out
    for strategy in STRATEGIES:
        two, said = in_two(workers, cwd, strategy, *argv)
        assert_same(same, one, two)
        assert steps(one.stats) == steps(two.stats)
        assert steps(one.faults) == steps(two.faults)
        assert faults(one) == faults(two)
        assert {line["of_rank"] for line in two.faults} == {0, 1}
        assert same.rows_of(two, "rows", "fc").ranks.unique().tolist() == [0, 1]
        assert told(said) == told(printed)
        assert "epoch 2/2" in said


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


def test_an_own_module_is_trained_on_two_ranks(workers: Any, same: Any, cwd: Path) -> None:
    """Batches of one row at the end: the second rank has none, and records nothing."""
    (cwd / "ranks_own.py").write_text(OWN)
    own = "+hooks.{}={{select: fc, hook: forward, action: python, function: 'ranks_own:{}', args: {}}}"
    trust = "+trust=[ranks_own]"
    argv = (
        trust, "data.batch_size=1", own.format("own", "Adapter", "{width: 10}"), *entries(CONDITIONS),
        "+hooks.whole={select: fc.own_down_weight, hook: grad, action: stats}",
        "+hooks.seen={select: fc, hook: forward, action: stats, of: mean, priority: -1}",
    )  # fmt: skip

    def of_hook(run: Run, name: str) -> list[dict[str, Any]]:
        return [line for line in run.stats if line["hook"] == name]

    one, (two, said) = in_one(cwd, *argv), in_two(workers, cwd, "ddp", *argv)
    same.weights(one, two, atol=1e-5)
    same.metrics(one, two)
    same.rows(one, two)
    assert "own: your own function gets only a rank's own rows" in said
    for line, other in zip(*(of_hook(run, "whole") for run in (one, two)), strict=True):
        same.line(line, other)
    for mine, theirs in zip(of_hook(two, "own"), of_hook(two, "seen"), strict=True):
        same.line({**theirs, "hook": "own", "action": "python"}, mine)
    ended = workers.run(cwd, *SMALL, trust, own.format("h", "noisy", "{}"), "compute.strategy=ddp")
    assert set(ended.codes) == {1}
    assert "draws random numbers for the rows of a batch" in ended.said[0]


def test_a_rank_without_rows_takes_part(workers: Any, same: Any, cwd: Path) -> None:
    """Batches of one row: the second rank never has one; what it computes in the meantime has no effect."""
    names = ("inputs", "added", "noisy", "rows", "pushed", "clip", "seen", "gradient")
    more = ("data.batch_size=1", "train.accumulate=2", "train.limit_batches=5", "train.clip_grad_value=0.005")
    argv = (*entries({name: HOOKS[name] for name in names}), *more)
    one = in_one(cwd, *argv)
    for strategy in STRATEGIES:
        assert_same(same, one, in_two(workers, cwd, strategy, *argv)[0])


def test_predictions_are_those_of_one_rank(workers: Any, same: Any, cwd: Path) -> None:
    """The 359 rows of the split in batches of 179: of the last one, of a single row, one rank has none."""
    more = ("task=predict", "task.backward={score: label}", "data.batch_size=179", "train.limit_batches=null")
    argv = (*entries({name: HOOKS[name] for name in ("rows", "gradient")}), FOLD, *more)
    one = in_one(cwd, *argv)
    for strategy in STRATEGIES:
        two, _ = in_two(workers, cwd, strategy, *argv)
        assert_same(same, one, two)
        same.folds(one, two)
        assert torch.equal(one.folds["units"]["fc"].top.samples, two.folds["units"]["fc"].top.samples)
        assert isinstance(one.predictions, StoredCapture)
        assert isinstance(two.predictions, StoredCapture)
        assert torch.equal(one.predictions.sample_ids, two.predictions.sample_ids)
        assert torch.allclose(one.predictions[:], two.predictions[:], atol=1e-6)
        for line, other in zip(one.samples.lines, two.samples.lines, strict=True):
            assert line == {**other, "loss": pytest.approx(other["loss"], rel=1e-4)}
        assert (one.path / "pictures.jsonl").read_text() == (two.path / "pictures.jsonl").read_text()
        assert one.metrics == two.metrics


def test_what_cannot_be_sharded_is_refused(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*SMALL, *STRATEGIES["fsdp"][:2], "task=plan"]
    hook = "+hooks.h={select: fc, hook: "
    for override, told in {
        "compute.fsdp.wrap=convX": "compute.fsdp.wrap: 'convX' matches no module",
        "compute.compile=true": "compute.compile: a compiled model",
        "compute.precision=fp16": "compute.precision: the gradient scaler of fp16",
        hook
        + "forward, action: add_bias, value: 1, trainable: true}": "parameter without dimensions, and the hook",
        hook
        + "apply, action: add_parameter, name: z, shape: []}": "parameter without dimensions, and the hook",
        "+compute.fsdp.size=2": "compute.fsdp.size",
    }.items():
        assert main([*argv, override]) == 2, override
        assert told in capsys.readouterr().err, override
    assert main([*argv, "compute.fsdp.mixed_precision=bf16"]) == 0
    assert "differs from one process: compute.fsdp.mixed_precision" in capsys.readouterr().out
    assert main([*argv, "compute.fsdp.mixed_precision=bf16", "strict=true"]) == 2


HOOKS = {
    "filled": "select: fc, hook: apply, action: fill, value: 0.02, parameters: [bias]",
    "frozen": "select: conv1, hook: apply, action: freeze",
    "inputs": "select: conv1, hook: forward_pre, action: scale, factor: 0.9",
    "added": "select: relu1, hook: forward, action: add_bias, value: [0.01], trainable: true",
    "noisy": "select: relu1, hook: forward, action: noise, std: 0.1, when: {probability: 0.7}",
    "faulty": "select: relu1, hook: forward, action: flip_bits, count: 1, per: sample, bits: [20]",
    "rows": "select: fc, hook: forward, action: capture",
    "saved": "select: conv2, hook: saved_tensors, action: stats, of: bytes",
    "read": "select: conv1.weight, hook: weight, action: scale, factor: 1.01",
    "before": "select: relu2, hook: backward_pre, action: clamp, min: -0.001, max: 0.001",
    "after": "select: conv2, hook: backward, action: scale, factor: 0.5",
    "output": "select: relu2, hook: output_grad, action: capture",
    "pushed": "select: fc, hook: output_grad, action: add_bias, value: 0.0001",
    "drawn": "select: fc.weight, hook: grad, action: noise, std: 0.001",
    "clip": "select: fc, hook: grad, action: clamp, min: -0.01, max: 0.01, priority: 1",
    "bounded": "select: conv2, hook: post_accumulate_grad, action: clamp, min: -0.001, max: 0.001",
    "seen": "select: [fc.weight, conv2], hook: post_accumulate_grad, action: stats, priority: 1",
    "norm": "select: [conv2, fc], hook: optimizer_step_pre, action: clip_norm, max_norm: 0.01",
    "gradient": "select: fc.bias, hook: grad, action: capture, priority: 2",
    "weight": "select: fc.weight, hook: optimizer_step_post, action: clamp, min: -0.1, max: 0.1, index: '0:3'",
    "checked": "select: conv2.weight, hook: grad, action: check",
    "loss": "select: '', hook: forward, action: check, of: loss, over: {steps: 1}, max: 0, policy: warn",
}


CONDITIONS = {
    "high": "select: fc, hook: forward, action: capture, when: {value: {of: max, above: 1.3}}",
    "grows": "select: relu2, hook: forward, action: noise, std: {from: 0, to: 0.2, steps: [0, 4]}, "
    "when: {value: {of: mean, above: 0.05}}",
    "label": "select: fc, hook: forward, action: capture, when: {data: {label: [0, 1, 2, 3, 4]}}",
    "odd": "select: fc, hook: output_grad, action: scale, factor: 0.5, when: {data: {class: ['1', '7']}}",
    "source": "select: conv1, hook: forward, action: capture",
    "patch": "select: relu1, hook: forward, action: add_bias, value: {hook: source}",
}


FOLD = (
    "+hooks.units={select: [relu2, fc], hook: forward, action: fold, of: [mean, cov, {quantiles: [0.5]}, {top: 2}], "
    "by: label}"
)


def entries(hooks: dict[str, str]) -> list[str]:
    return [f"+hooks.{name}={{{hook}}}" for name, hook in hooks.items()]


def in_one(cwd: Path, *argv: str) -> Run:
    assert main([*SMALL, *argv, "hydra.run.dir=one"]) == 0
    return hookrun.open_run(cwd / "one")


def in_two(workers: Any, cwd: Path, strategy: str, *argv: str) -> tuple[Run, str]:
    """The run of two processes, and what rank 0 printed."""
    ended = workers.run(cwd, *SMALL, *argv, *STRATEGIES[strategy], f"hydra.run.dir={strategy}")
    assert ended.codes == [0, 0], ended.said
    assert ended.said[1] == "", "rank 0 alone speaks"
    return hookrun.open_run(cwd / strategy), ended.said[0]


def by_place(run: Run) -> list[dict[str, Any]]:
    """The records of each step in the order of their parameters; `saved` records the rows of each rank."""
    whole = (line for line in run.stats if line["hook"] != "saved")
    return sorted(whole, key=lambda line: (line["epoch"], line["step"], line["hook"], line["module"]))


def assert_same(same: Any, one: Run, two: Run) -> None:
    for name in ("last", "best", "ema"):
        path = Path("checkpoints") / f"{name}.safetensors"
        assert (one.path / path).exists() == (two.path / path).exists()
        if (one.path / path).exists():
            assert list(weights(one, name)) == list(weights(two, name))
            same.weights(one, two, name, atol=1e-5)
    same.metrics(one, two)
    for line, other in zip(by_place(one), by_place(two), strict=True):
        same.line(line, other)
    same.rows(one, two)
    assert one.hooks == two.hooks, "as often, and as many elements changed"
    assert verify(two.path).bad == []


def faults(run: Run) -> list[tuple[Any, ...]]:
    return sorted((line["mode"], line["step"], line["element"], line["sample"]) for line in run.faults)


def steps(lines: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """The epoch and step of each line, once for neighbours of the same step."""
    return [step for step, _ in groupby((line["epoch"], line["step"]) for line in lines)]


def told(printed: str) -> list[str]:
    words = ("changed", "fired", "captured", "counted")
    return [line for line in printed.splitlines() if any(word in line for word in words)]
