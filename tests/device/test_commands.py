"""Tasks from the command line write the same as on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from joint_outcomes import assert_equal
from run_files import numbers_of

from hookrun.store.reader import Run
from hookrun.store.verify import verify

SMALL = ("train.limit_batches=3", "data.batch_size=8")
NAMES = ("model=decoder", "model.args.width=16", "model.args.length=48", "data=names", "data.batch_size=2")
CAPTURE = "+hooks.seen={select: relu1, hook: forward, action: capture}"
OF_IMAGES = (
    CAPTURE,
    "+hooks.few={select: relu2, hook: forward, action: capture, keep: {every: 3}}",
    "+hooks.bound={select: relu2, hook: forward, action: clamp, max: 0.5}",
    "+hooks.some={select: fc, hook: forward, action: scale, factor: 0.5, when: {data: {label: [3, 4]}}}",
    "+hooks.high={select: fc, hook: forward, action: stats, when: {value: {of: max, above: 0}}}",
    "+hooks.grows={select: conv1, hook: forward, action: scale, factor: {from: 1, to: 2, steps: [0, 3]}}",
    "+hooks.faulty={select: relu1, hook: forward, action: flip_bits, count: 3, bits: [20]}",
    "+hooks.warned={select: fc, hook: forward, action: check, max: 0.1, policy: warn}",
)
COMMANDS = {
    "train": (*OF_IMAGES, "train.epochs=2", "train.log_every=1", "train.checkpoint.save=last"),
    "evaluate": (*OF_IMAGES, "task=evaluate", "task.metrics=[loss,accuracy,auroc]"),
    "predict": (
        *OF_IMAGES,
        "task=predict",
        "+task.backward={score: top}",
        "+hooks.grads={select: relu1, hook: output_grad, action: capture}",
    ),
    "attribute": (CAPTURE, "task=attribute", "task.steps=2"),
    "effects": (
        "task=effects",
        "task.metric=loss",
        "task.hook=all",
        "task.over={module: [relu1, relu2], factor: [0.5, 2.0]}",
        "+hooks.all={select: [relu1, relu2], hook: forward, action: scale}",
    ),
    "generate": (
        *NAMES,
        "task=generate",
        "task.without_hooks=true",
        "task.max_new_tokens=4",
        "+hooks.seen={select: blocks.0, hook: forward, action: capture, tokens: {phase: generation}}",
        "+hooks.last={select: blocks.1, hook: forward, action: scale, factor: 2, tokens: -1}",
    ),
    "lens": (*NAMES, "task=lens", "+hooks.seen={select: blocks.0, hook: forward, action: capture}"),
}


@pytest.mark.parametrize("task", COMMANDS)
def test_a_task_writes_the_same_as_on_the_cpu(
    task: str, run: Callable[..., Run], device: torch.device
) -> None:
    argv = (*SMALL, *COMMANDS[task])
    found = run(*argv)
    assert verify(found.path).bad == []
    assert found.env["device"] == device.type
    expected = numbers_of(run(*argv, on="cpu"))
    assert any(expected[part] for part in ("captures", "lines", "attributions"))
    assert_equal(numbers_of(found), expected, tolerance=1e-4)
