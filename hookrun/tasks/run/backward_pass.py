"""One backward pass for each batch without training: computes its score, and clears the gradients afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hookrun.errors import Problem, SpecError, counted, spec_error
from hookrun.spec.task import BackwardPass
from hookrun.tasks.metrics.losses import TrainLoss
from hookrun.tasks.metrics.rows import main_tensor
from hookrun.tasks.run.batches import Batch
from hookrun.tasks.run.context import RunContext
from hookrun.values.containers import differentiable, rebuild

Score = Callable[[Any, Tensor], Tensor]
"""(the model's output for a batch, its targets [B, ...]) -> the sum of its samples' scores, without dimensions."""

_WHERE = "task.backward"


def score_of(backward: BackwardPass, loss: TrainLoss, output: Any, target: Tensor) -> Tensor:
    """The score that `backward` names, summed over the samples. Raises SpecError if the output does not fit.

    loss: the loss of `train.loss`
    """
    score = _total(backward, loss, rebuild(output, _precise), target)
    if not score.requires_grad:
        raise spec_error(
            _WHERE,
            "the score requires no gradient: neither a parameter of the model nor an input requires one",
            "freeze less of the model",
        )
    return score


def _precise(leaf: Any) -> Any:
    """A tensor in half precision as float32: a sum in half precision would be inexact."""
    is_half = isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)
    return leaf.float() if is_half else leaf


def _total(backward: BackwardPass, loss: TrainLoss, output: Any, target: Tensor) -> Tensor:
    scores, samples = main_tensor(output), target.shape[0]
    if backward.score == "output":
        return scores.sum()
    if scores.dim() == 0 or scores.shape[0] != samples:
        found = f"the model returned shape {list(scores.shape)} for {counted(samples, 'sample')}"
        text = f"{found}, expected a row for each sample"
        raise _refused("score", text, "score: output takes any shape")
    if backward.score == "loss":
        return _losses(loss, output, target)
    if scores.dim() != 2:
        text = f"{backward.score!r} needs an output [batch, classes], and the model returned {list(scores.shape)}"
        raise _refused("score", text, "use output or loss")
    if backward.score == "top":
        return scores.max(1).values.sum()
    if backward.score == "label":
        return scores.gather(1, target.reshape(samples, 1).long()).sum()
    if (number := backward.class_) is None or number >= scores.shape[1]:
        text = f"found {number}, and the model has {scores.shape[1]} classes"
        raise _refused("class", text, f"use a number from 0 to {scores.shape[1] - 1}")
    return scores[:, number].sum()


def _losses(loss: TrainLoss, output: Any, target: Tensor) -> Tensor:
    """The sum of the samples' losses, each computed alone: with a batch mean, gradients depend on the batch size."""
    if loss.name == "output":
        text = "'loss' needs a loss of each sample, and with train.loss=output the model returns one for the batch"
        raise _refused("score", text, "use output, top or class, or another train.loss")
    samples = target.shape[0]

    def alone(number: int) -> Tensor:
        def row(leaf: Any) -> Any:
            batched = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == samples
            return leaf[number : number + 1] if batched else leaf

        return loss(rebuild(output, row), target[number : number + 1])

    return torch.stack([alone(number) for number in range(samples)]).sum()


def _refused(key: str, what: str, hint: str) -> SpecError:
    return SpecError([Problem(f"{_WHERE}.{key}", what, hint)])


def _reduce(context: RunContext) -> None:
    """With several ranks: sum the gradients of hooked parameters over the ranks, and run their hooks."""
    if not context.ranks.several:
        return
    if context.sharded:
        context.reduced.run()
        return
    hooked = context.reduced.parameters
    there = context.ranks.largest([parameter.grad is not None for parameter in hooked]) if hooked else []
    with torch.no_grad():
        for parameter, is_somewhere in zip(hooked, there, strict=True):
            if not is_somewhere:
                continue
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            context.ranks.sum_([parameter.grad])
    context.reduced.run()


def forward_and_backward(context: RunContext, score: Score, batch: Batch) -> Any:
    """The model's output, detached, after a backward pass from the score; parameters have no `grad` afterwards.

    Floating-point inputs require a gradient too, so that a `backward` hook on the first module sees it.

    Returns None if this rank has no row of the batch.
    """
    if not len(batch.ids):
        if context.sharded and batch.pattern is not None:
            with context.standing_in():
                forward_and_backward(context, lambda *of: score(*of) * 0, batch.pattern)
        else:
            _reduce(context)
        return None
    inputs = rebuild(batch.inputs, partial(differentiable, leaf=context.settings.compute.compile))
    try:
        with torch.enable_grad():
            output = context.forward(replace(batch, inputs=inputs))
            total = score(output, batch.target)
        total.backward()
        _reduce(context)
    finally:
        context.model.zero_grad(set_to_none=True)
    return rebuild(output, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)
