"""One training step: zero_grad, accumulate, backward, clip, check, step, log, schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hookrun.run.experiment.optimizers import clip
from hookrun.run.experiment.sharding import sharded_states, whole_states
from hookrun.run.passes.average import Average
from hookrun.run.passes.batches import Batch, Batches
from hookrun.run.passes.context import RunContext
from hookrun.run.training.ema import WeightAverage
from hookrun.run.training.nonfinite import FiniteSteps

Share = Tensor | float
"""The factor of a micro-batch's mean loss in the loss of the step."""

MicroBatchResult = tuple[Any, Tensor | None]
"""The output and the loss of a micro-batch; both are None if this rank has no row of it."""


@dataclass
class Training:
    """The state of training, in addition to the model.

    steps:     steps the optimizer if loss and gradients are finite
    interval:  whether the scheduler is stepped after each step, or after each epoch
    means:     loss and metrics over the samples of the current epoch
    gradients: computes the gradients of a step
    step_means: loss and metrics over the samples of the current step
    average:   the moving average of the weights, which is validated; None: the weights themselves are validated
    epoch:     the current epoch
    batches:   how many batches of it are finished
    values:    the means of the epoch's training if that is finished, and only its validation is left; otherwise None
    best:      the highest score of an epoch so far: the accuracy, or the negative loss
    """

    context: RunContext
    optimizer: Optimizer
    steps: FiniteSteps
    scheduler: LRScheduler | None
    interval: Literal["step", "epoch"]
    train: Batches
    val: Batches | None
    means: Average
    gradients: StepGradients
    step_means: Average
    average: WeightAverage | None = None
    epoch: int = 0
    batches: int = 0
    values: dict[str, float] | None = None
    best: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether a check stops the run, or all steps are done."""
        limit = self.context.settings.train.steps
        return self.context.stopped or (limit is not None and self.context.hooks.clock.step >= limit)

    @property
    def label(self) -> str:
        """The epoch, as it is shown."""
        return f"epoch {self.epoch + 1}/{self.context.settings.train.epochs}"

    def state_dict(self) -> dict[str, Any]:
        """The state from which training can be resumed, without model and hooks; every rank calls it."""
        sharded = self.context.sharded
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "means": self.means.state_dict(),
            "values": self.values,
            "best": self.best,
            "optimizer": whole_states(self.optimizer) if sharded else self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scaler": self.context.scaler.state_dict(),
            "steps": self.steps.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the state of training by a saved one."""
        self.epoch = state["epoch"]
        self.batches = state["batches"]
        self.means.load_state_dict(state["means"])
        self.values = state["values"]
        self.best = state["best"]
        self.optimizer.load_state_dict(sharded_states(state["optimizer"], self.optimizer))
        self.steps.load_state_dict(state["steps"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
            # so that torch does not warn of a schedule that starts before the optimizer
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
        if state["scaler"]:  # a disabled scaler has no state
            self.context.scaler.load_state_dict(state["scaler"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])


def train_step(training: Training, group: Sequence[Batch], shown: dict[str, float]) -> None:
    """One step of the optimizer over the micro-batches of `group`.

    Hooks fire in `compute` (forward, backward, gradients), before and after `steps.step` (optimizer), and the clock
    that their `when` reads advances at the end.

    shown: receives the loss and the metrics of a logged step, for the progress bar
    """
    context = training.context
    optimizer = training.optimizer
    step_means = training.step_means
    hooks = context.hooks
    settings = context.settings.train
    with context.logged(hooks.clock.step) as is_logged, context.noting_changes(is_logged):
        optimizer.zero_grad(set_to_none=True)
        training.steps.before.take()

        # Forward and backward of each micro-batch, weighted by its share of the samples of the step.
        step_means.clear()
        losses: list[Tensor | None] = []
        shares = training.gradients.shares(group)
        for number, (batch, share) in enumerate(zip(group, shares, strict=True), 1):
            hooks.accumulating = number < len(group)
            output, loss = training.gradients.compute(batch, share, last=number == len(group))
            losses.append(None if loss is None else loss.detach())
            if loss is not None:
                context.measure(step_means, loss.detach(), output, batch)

        # Clip, check that loss and gradients are finite, and step.
        # With fused optimizers, hooks would otherwise see scaled gradients.
        context.scaler.unscale_(optimizer)
        norm = clip(settings, optimizer)
        weighted = training.gradients.losses(losses, shares)
        if weighted and hooks.clock.reads_loss:
            hooks.loss = torch.stack(weighted).sum()
        outcome = training.steps.step(group, weighted)
        if training.average is not None and outcome == "stepped":
            training.average.update()

        if outcome != "skipped":
            training.means.include(step_means)
        if is_logged and outcome != "skipped":
            values = context.sum_over_ranks(step_means).read()
            shown.update(values)
            more = {"lr": optimizer.param_groups[0]["lr"]}
            if norm is not None:
                more["grad_norm"] = float(norm)
            context.log("train", values, "batch", **more)
        if is_logged:
            context.sink.settle()
    if training.scheduler is not None and training.interval == "step" and outcome == "stepped":
        training.scheduler.step()
    hooks.step()
    context.agree()


class StepGradients:
    """The gradients of a step in one process; `hookrun.run.training.rank_gradients` has those of several.

    The loss of each micro-batch is weighted by its share of the samples, or tokens, of the step.
    """

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.ranks = context.ranks

    def shares(self, group: Sequence[Batch]) -> Sequence[Share]:
        """The factor of each micro-batch's loss."""
        weights = [batch.weight_without(self.context.prepared.loss.ignored) for batch in group]
        whole = max(sum(weights), 1)  # samples may have nothing to predict
        return [weight / whole for weight in weights]

    def compute(self, batch: Batch, share: Share, *, last: bool) -> MicroBatchResult:
        """The forward and the backward pass of a micro-batch, whose gradients are added to `grad`; output and loss.

        last: it is the last micro-batch of the step
        """
        output = self.context.forward(batch)
        loss = self.context.loss(output, batch)
        is_whole_step = isinstance(share, float) and share == 1
        self.context.scaler.scale(loss if is_whole_step else loss * share).backward()
        self.context.after(batch)
        return output, loss

    def losses(self, losses: Sequence[Tensor | None], shares: Sequence[Share]) -> list[Tensor]:
        """The weighted losses of the micro-batches, which have to be finite for a step; their sum is its loss."""
        return [loss * share for loss, share in zip(losses, shares, strict=True) if loss is not None]
