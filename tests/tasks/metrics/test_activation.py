"""The loss `activation`: the mean of a module's output after the hooks."""

from __future__ import annotations

import pytest

FEW = ("data.batch_size=4", "train.limit_batches=1")


def test_it_is_the_mean_of_the_part_under_the_hooks_and_trains_what_raises_it(executed, hook) -> None:
    see, double = (
        "+hooks.seen={select: conv2, hook: forward, action: capture}",
        hook(select="conv1", hook="forward", action="scale", factor=2),
    )
    loss = "train.loss={name: activation, module: conv2, index: ':, 5', maximize: true}"
    found = executed("task=evaluate", *FEW, loss, see, double)
    expected = -found.captures["seen"]["conv2"][:][:, 5].mean()
    assert found.metrics[-1]["loss"] == pytest.approx(expected.item(), rel=1e-5)
    lower = executed(
        *FEW, "train.loss={name: activation, module: conv2}", "train.epochs=3", "train.optimizer.lr=0.01"
    )
    losses = [line["loss"] for line in lower.metrics if line["split"] == "val"]
    assert losses[0] > losses[1] > losses[2]


def test_a_module_or_a_part_that_is_not_there_is_refused(fails, refused) -> None:
    assert "the model has no module 'conv3'" in refused("train.loss={name: activation, module: conv3}")
    assert "train.loss.module: is missing" in refused("train.loss=activation")
    assert "train.loss.index" in refused("train.loss={name: activation, module: fc, index: 'x'}")
    assert "compute.compile" in refused("train.loss={name: activation, module: fc}", "compute.compile=true")
    said = fails("task=evaluate", *FEW, "train.loss={name: activation, module: fc, index: ':, 10'}")
    assert "out of bounds for dimension 1 with size 10" in said
