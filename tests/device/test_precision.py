"""Training in each precision, and with what trains differently on a device, goes as in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from joint_outcomes import assert_equal
from run_files import numbers_of

from hookrun.store.reader import Run

TRAIN = (
    *("model=mlp", "data=digits", "data.batch_size=8", "train.limit_batches=3", "train.epochs=2"),
    *("train.log_every=1", "train.checkpoint.save=last"),
    "+hooks.seen={select: fc, hook: output_grad, action: capture}",
    "+hooks.size={select: fc, hook: grad, action: stats}",
    "+hooks.bound={select: '**', hook: optimizer_step_pre, action: clip_norm, max_norm: 0.5}",
)
VARIANTS = {
    "ema": ("train.ema={decay: 0.9}",),
    "accumulation": ("train.accumulate=2",),
    "workers": ("data.workers=1",),
    "fused": ("train.optimizer.name=AdamW", "+train.optimizer.fused=true"),
}
TOLERANCES = {"fp32": 1e-5, "bf16": 0.05, "fp16": 0.02}


def sizes_of(found: dict[str, Any]) -> dict[str, Any]:
    """What is compared of a run in half precision: its losses, weights and gradients, which are not scaled."""
    metrics = [line for line in found["lines"]["metrics.jsonl"] if "train/loss" in line]
    norms = [line["norm"] for line in found["lines"]["stats.jsonl"]]
    return {"metrics": [line["train/loss"] for line in metrics], "norms": norms, "weights": found["weights"]}


@pytest.mark.parametrize("precision", TOLERANCES)
def test_results_are_those_of_float32(precision: str, run: Callable[..., Run]) -> None:
    expected = numbers_of(run(*TRAIN, on="cpu"))
    found = numbers_of(run(*TRAIN, f"compute.precision={precision}"))
    assert len(found["lines"]["stats.jsonl"]) > 0
    assert_equal(sizes_of(found), sizes_of(expected), tolerance=TOLERANCES[precision])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_training_goes_as_on_the_cpu(variant: str, run: Callable[..., Run]) -> None:
    argv = (*TRAIN, *VARIANTS[variant])
    assert_equal(numbers_of(run(*argv)), numbers_of(run(*argv, on="cpu")), tolerance=1e-4)
