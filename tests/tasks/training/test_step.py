"""The gradients of one step: micro-batches together are one batch, weighted by what each has to predict."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn import functional as F

from hookrun.ranks.alone import ALONE
from hookrun.tasks.run.batches import Batch
from hookrun.tasks.run.context import RunContext
from hookrun.tasks.sharded.rank_gradients import StepGradientsOfRanks, step_gradients
from hookrun.tasks.training.step import StepGradients


def context(model: nn.Module, after: list[Any]) -> RunContext:
    """The running task: the model as its forward, and cross entropy as its loss."""
    made = SimpleNamespace(
        ranks=ALONE,
        forward=lambda batch: model(batch.inputs),
        loss=lambda output, batch: F.cross_entropy(output, batch.target),
        scaler=GradScaler("cpu", enabled=False),
        after=after.append,
    )
    return cast(RunContext, made)


def batch(inputs: torch.Tensor, target: torch.Tensor, weight: int, tokens: bool = False) -> Batch:
    made = SimpleNamespace(
        inputs=inputs, target=target, weight=weight, data=SimpleNamespace(of_tokens=tokens)
    )
    return cast(Batch, made)


def test_micro_batches_of_different_sizes_give_the_gradient_of_all_samples() -> None:
    torch.manual_seed(0)
    model, pixels, labels = nn.Linear(4, 3), torch.randn(7, 4), torch.randint(0, 3, (7,))
    (expected,) = torch.autograd.grad(F.cross_entropy(model(pixels), labels), [model.weight])
    after = list[Any]()
    gradients = step_gradients(context(model, after))
    assert type(gradients) is StepGradients
    group = [
        batch(part, target, len(part)) for part, target in zip(pixels.split(5), labels.split(5), strict=True)
    ]
    shares = gradients.shares(group)
    assert shares == [5 / 7, 2 / 7]
    results = [
        gradients.compute(each, share, last=each is group[-1])
        for each, share in zip(group, shares, strict=True)
    ]
    torch.testing.assert_close(model.weight.grad, expected)
    assert after == group, "the run is told after each"
    losses = [loss for _, loss in results]
    assert all(
        torch.equal(one, other) for one, other in zip(gradients.losses(losses, shares), losses, strict=True)
    )
    assert gradients.losses([None, losses[1]], shares) == [losses[1]]


def test_a_single_batch_of_images_is_not_weighted_and_one_of_tokens_without_targets_counts_nothing() -> None:
    gradients, nothing = step_gradients(context(nn.Linear(1, 1), [])), torch.zeros(0)
    assert gradients.shares([batch(nothing, nothing, 5)]) == (1.0,)
    assert gradients.shares([batch(nothing, nothing, 5, tokens=True)]) == [1.0]
    empty = [batch(nothing, nothing, 0, tokens=True)] * 2
    assert gradients.shares(empty) == [0.0, 0.0], "no division by 0"


@pytest.mark.parametrize("sums", [False, True])
def test_a_rank_weights_by_its_rows_among_those_of_all_and_a_loss_that_sums_by_whole_batches(
    sums: bool,
) -> None:
    gradients = object.__new__(StepGradientsOfRanks)  # without torch's process group
    loss = SimpleNamespace(sums=sums)
    gradients.context = cast(RunContext, SimpleNamespace(prepared=SimpleNamespace(loss=loss)))
    images = SimpleNamespace(of_tokens=False)
    group = [
        SimpleNamespace(whole=8, ids=range(3), data=images),
        SimpleNamespace(whole=2, ids=(), data=images),
    ]
    assert gradients.shares(cast(list[Batch], group)) == ([0.8, 0.2] if sums else [0.3, 0.0])
