"""compute=fsdp: parameters are sharded over two processes, and the results are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hookrun
from hookrun.cli import main
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
    "train.log_every=2",
    "train.optimizer={name: SGD, lr: 0.05}",
)
FSDP = ("compute=fsdp", "compute.device=cpu", "compute.fsdp.wrap='{conv2,fc}'")
HOOKS = {
    "filled": "select: fc, hook: apply, action: fill, value: 0.02, parameters: [bias]",
    "frozen": "select: conv1, hook: apply, action: freeze",
    "inputs": "select: conv1, hook: forward_pre, action: scale, factor: 0.9",
    "added": "select: relu1, hook: forward, action: add_bias, value: [0.01], trainable: true",
    "noisy": "select: relu1, hook: forward, action: noise, std: 0.1, when: {probability: 0.7}",
    "rows": "select: fc, hook: forward, action: capture",
    "after": "select: conv2, hook: backward, action: scale, factor: 0.5",
    "pushed": "select: fc, hook: output_grad, action: add_bias, value: 0.0001",
    "drawn": "select: fc.weight, hook: grad, action: noise, std: 0.001",
    "clip": "select: fc, hook: grad, action: clamp, min: -0.01, max: 0.01, priority: 1",
    "bounded": "select: conv2, hook: post_accumulate_grad, action: clamp, min: -0.001, max: 0.001",
    "seen": "select: [fc.weight, conv2], hook: post_accumulate_grad, action: stats, priority: 1",
    "norm": "select: [conv2, fc], hook: optimizer_step_pre, action: clip_norm, max_norm: 0.01",
    "gradient": "select: fc.bias, hook: grad, action: capture, priority: 2",
    "weight": "select: fc.weight, hook: optimizer_step_post, action: clamp, min: -0.1, max: 0.1, index: '0:3'",
    "checked": "select: conv2.weight, hook: grad, action: check",
}


def both(workers: Any, cwd: Path, *argv: str) -> tuple[Run, Run]:
    """The run of one process, and that of two with sharded parameters."""
    assert main([*SMALL, *argv, "hydra.run.dir=one"]) == 0
    ended = workers.run(cwd, *SMALL, *argv, *FSDP, "hydra.run.dir=two")
    assert ended.codes == [0, 0], ended.said
    assert ended.said[1] == "", "rank 0 alone speaks"
    return hookrun.open_run(cwd / "one"), hookrun.open_run(cwd / "two")


def by_place(run: Run) -> list[dict[str, Any]]:
    """The records of each step in the order of their parameters."""
    return sorted(run.stats, key=lambda line: (line["epoch"], line["step"], line["hook"], line["module"]))


def assert_same(same: Any, one: Run, two: Run) -> None:
    for name in ("last", "best", "ema"):
        path = Path("checkpoints") / f"{name}.safetensors"
        assert (one.path / path).exists() == (two.path / path).exists()
        if (one.path / path).exists():
            assert list(same.stored(one, name)) == list(same.stored(two, name))
            same.weights(one, two, name)
    same.metrics(one, two)
    for line, other in zip(by_place(one), by_place(two), strict=True):
        same.line(line, other)
    same.rows(one, two)
    assert one.hooks == two.hooks, "as often, and as many elements changed"
    assert verify(two.path).bad == []


def test_training_with_hooks_on_everything(workers: Any, same: Any, cwd: Path) -> None:
    """Micro-batches of 11 rows, of which one rank has 6 and the other 5; steps of two, and an average of weights."""
    argv = [f"+hooks.{name}={{{hook}}}" for name, hook in HOOKS.items()]
    more = ("data.batch_size=11", "train.accumulate=2", "train.ema={decay: 0.5}", "train.clip_grad_norm=1")
    assert_same(same, *both(workers, cwd, *argv, *more))


def test_a_rank_without_rows_takes_part(workers: Any, same: Any, cwd: Path) -> None:
    """Batches of one row: the second rank never has one; what it computes in the meantime has no effect."""
    names = ("inputs", "added", "noisy", "rows", "pushed", "clip", "seen", "gradient")
    argv = [f"+hooks.{name}={{{HOOKS[name]}}}" for name in names]
    more = ("data.batch_size=1", "train.accumulate=2", "train.limit_batches=5", "train.clip_grad_value=0.005")
    assert_same(same, *both(workers, cwd, *argv, *more))


def test_predictions_and_gradients_without_training(workers: Any, same: Any, cwd: Path) -> None:
    """The 359 rows of the split in batches of 179: of the last one, of a single row, one rank has none."""
    argv = [f"+hooks.{name}={{{HOOKS[name]}}}" for name in ("rows", "gradient")]
    more = ("task=predict", "task.backward={score: label}", "data.batch_size=179", "train.limit_batches=null")
    one, two = both(workers, cwd, *argv, *more)
    assert_same(same, one, two)
    assert isinstance(one.predictions, StoredCapture) and isinstance(two.predictions, StoredCapture)
    assert torch.equal(one.predictions.sample_ids, two.predictions.sample_ids)
    assert torch.allclose(one.predictions[:], two.predictions[:], atol=1e-6)


def test_what_cannot_be_sharded_is_refused(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*SMALL, "compute=fsdp", "compute.device=cpu", "task=plan"]
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
