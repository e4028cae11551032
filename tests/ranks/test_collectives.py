"""Every rank starts the same collectives in the same order, whatever happens on one of them only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import hookrun

CHECK = "+hooks.check={select: conv1, hook: forward_pre, action: check, policy: stop}"
KEEPS = "+hooks.keeps={select: conv1, hook: forward, action: capture, keep: {reservoir: 2}}"
STEPS = "+hooks.steps={select: fc.weight, hook: optimizer_step_pre, action: stats, when: {rank: 1}}"
BROKEN = (
    "+hooks.broken={select: fc.bias, hook: grad, action: scale, factor: nan, index: '0', when: {step: 1}}"
)
NOISE = "+hooks.noise={select: conv2, hook: forward, action: noise, std: 0.1}"
CASES = [
    ("fsdp", 2, 8, ["train.on_nonfinite=skip", STEPS, BROKEN], 0),  # step 1: in the shard of rank 0 alone
    ("ddp", 2, 8, ["train.on_nonfinite=stop"], 3),
    ("fsdp", 3, 7, [CHECK, KEEPS, "train.accumulate=2"], 3),
    ("ddp", 3, 2, [KEEPS, NOISE, STEPS, "train.on_nonfinite=skip", "train.checkpoint.every={steps: 1}"], 0),
    ("fsdp", 3, 7, [CHECK, KEEPS, "task=evaluate"], 3),
    ("fsdp", 3, 7, [KEEPS, "task=predict", "task.backward={score: top}"], 0),
]


@pytest.mark.parametrize("strategy, ranks, rows, typed, code", CASES)
def test_what_one_rank_meets_alone_changes_no_collective(
    strategy: str, ranks: int, rows: int, typed: list[str], code: int, workers: Any, tmp_path: Path
) -> None:
    """The last row of the first batch, which the last rank with rows has, is not finite."""
    inputs = torch.ones(rows, 1, 8, 8)
    inputs[min(rows, 4) - 1] = torch.nan
    save_file(
        {"input": inputs, "target": torch.zeros(rows, dtype=torch.int64)}, tmp_path / "some.safetensors"
    )
    files = [f"data.args.{split}_file=some.safetensors" for split in ("train", "val")]
    settings = ["model=cnn", "model.args.num_classes=2", "data=tensors", *files, "data.batch_size=4"]
    more = ["train.shuffle=false", "train.epochs=1", "hydra.run.dir=run", "compute.timeout=20"]
    compute = [f"compute.strategy={strategy}", "compute.device=cpu", "compute.threads=1"]
    ended = workers.run(tmp_path, *settings, *more, *compute, *typed, ranks=ranks)
    assert ended.codes == [code] * ranks, ended.said
    first, *others = ended.collectives
    assert len(first) > 10 and others == [first] * (ranks - 1)
    assert hookrun.open_run(tmp_path / "run").status["status"] == ("stopped" if code else "done")
    assert (tmp_path / "run" / "report.html").exists()
