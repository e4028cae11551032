"""The gradients of one optimizer step: the passes of its micro-batches, in one process or in several."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from hookrun.runtime.rng import derived_seed
from hookrun.tasks.loop.batches import Batch
from hookrun.tasks.loop.running import Running

Share = Tensor | float
"""What the mean loss of a micro-batch counts in that of the step."""


class Passed(NamedTuple):
    """What a micro-batch gave. output, loss: None where this rank has no row of it."""

    output: Any = None
    loss: Tensor | None = None


class StepGradients:
    """In one process: each micro-batch's loss counts by its share of the samples, or tokens, of the step."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.ranks = running.ranks

    def shares(self, group: Sequence[Batch]) -> Sequence[Share]:
        """What the loss of each micro-batch is multiplied by."""
        if (
            len(group) == 1 and not group[0].data.of_tokens
        ):  # a batch of sequences may have nothing to predict
            return (1.0,)
        weights = [batch.weight for batch in group]
        whole = max(sum(weights), 1)
        return [weight / whole for weight in weights]

    def compute(self, batch: Batch, share: Share, *, last: bool) -> Passed:
        """The forward and the backward pass of a micro-batch; gradients are added to those before."""
        output = self.running.forward(batch)
        loss = self.running.loss(output, batch)
        is_all = isinstance(share, float) and share == 1
        self.running.scaler.scale(loss if is_all else loss * share).backward()
        self.running.after(batch)
        return Passed(output, loss)

    def losses(self, losses: Sequence[Tensor | None], shares: Sequence[Share]) -> list[Tensor]:
        """What has to be finite for a step to be made: the loss of each micro-batch."""
        return [loss for loss in losses if loss is not None]


class StepGradientsOfRanks(StepGradients):
    """In several processes: torch's DistributedDataParallel sums the gradients of the ranks' rows.

    Each rank's loss counts by its share of the samples, so that the sum is the gradient of the loss of all, and what
    `backward` and `output_grad` hooks see of a row is what one process would show them. Hooks on gradients of
    parameters run on the sum.
    """

    def __init__(self, running: Running) -> None:
        super().__init__(running)
        self._wrap()
        self._parameters = [each for each in running.model.parameters() if each.requires_grad]
        self._reduced = running.reduced
        if not self.ranks.is_main:  # or the modules' own dropout would draw one mask for different rows
            torch.manual_seed(derived_seed(running.settings.seed, self.ranks.rank))

    def _wrap(self) -> None:
        self._rows = _Rows(self.running)
        self._ddp = DistributedDataParallel(self._rows, find_unused_parameters=True)
        self._ddp.register_comm_hook(None, _summed)

    def _set_apart(self) -> list[tuple[nn.Parameter, Tensor | None]]:
        """Every parameter with the gradient of the micro-batches before, which is taken away for now."""
        before = [(parameter, parameter.grad) for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return before

    def shares(self, group: Sequence[Batch]) -> Sequence[Share]:
        """Of this rank's rows among those of all ranks."""
        if group[0].data.of_tokens:
            weights = [float(batch.weight) for batch in group]
            whole = max(sum(self.ranks.total(weights)), 1)
            return [weight / whole for weight in weights]
        whole = sum(batch.whole for batch in group)
        sums = self.running.prepared.loss.sums
        return [(batch.whole if sums else len(batch.ids)) / whole for batch in group]

    def compute(self, batch: Batch, share: Share, *, last: bool) -> Passed:
        """The same; the gradients are summed over the ranks, at the latest with the last micro-batch."""
        each = self._reduced.of_each_part
        before = self._set_apart() if each else []
        passed = Passed()
        if each or last or len(batch.ids):
            with nullcontext() if each or last else self._ddp.no_sync():
                loss = self._ddp(batch)
                passed = self._rows.take()
                self.running.scaler.scale(loss * share).backward()
        if each or last:
            self._reduced.run(before)
        self.running.after(batch)
        return passed

    def losses(self, losses: Sequence[Tensor | None], shares: Sequence[Share]) -> list[Tensor]:
        """The part of each micro-batch in the loss of the step, over all ranks: finite where every rank's is."""
        parts = [
            0.0 if loss is None else float(loss) * float(share)
            for loss, share in zip(losses, shares, strict=True)
        ]
        return [torch.tensor(part) for part in self.ranks.total(parts)]


class StepGradientsOfShards(StepGradientsOfRanks):
    """In several processes that divide the parameters: torch's fully_shard sums the gradients of the ranks' rows.

    Every rank takes part in every pass; one without rows computes another rank's row, whose loss counts nothing.
    """

    def _wrap(self) -> None:
        """It was done before the optimizer was made."""

    def compute(self, batch: Batch, share: Share, *, last: bool) -> Passed:
        """The same; the gradients are summed with each micro-batch."""
        running, each = self.running, self._reduced.of_each_part
        before = self._set_apart() if each else []
        own = batch.pattern is None
        with nullcontext() if own else running.standing_in():
            rows = batch.pattern or batch
            output = running.forward(rows)
            loss = running.loss(output, rows)
            running.scaler.scale(loss * (share if own else 0)).backward()
        if each or last:
            self._reduced.run(before)
        running.after(batch)
        return Passed(output, loss) if own else Passed()


class _Rows(nn.Module):
    """The loss of the rank's rows, as the module that DistributedDataParallel wraps.

    Since its result is the loss alone, every parameter that the loss does not depend on counts as unused, whatever
    else the model returns. A rank without rows takes part through a parameter of its own: the model, which may not be
    able to compute a batch of no rows, and its hooks do not run there.
    """

    def __init__(self, running: Running) -> None:
        super().__init__()
        self.model = running.model
        self.anchor = nn.Parameter(torch.zeros((), device=running.prepared.device))
        self._running = running
        self._passed = Passed()

    def forward(self, batch: Batch) -> Tensor:
        """The mean loss of the rows."""
        if not len(batch.ids):
            return self.anchor * 0
        output = self._running.forward(batch)
        loss = self._running.loss(output, batch)
        self._passed = Passed(output, loss)
        return loss

    def take(self) -> Passed:
        """What the last call gave; it is not kept."""
        passed, self._passed = self._passed, Passed()
        return passed


def _summed(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are texts
    """The sum of the gradients of all ranks. DistributedDataParallel itself would take the mean."""
    work = distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def step_gradients(running: Running) -> StepGradients:
    """Those of the run: of one process, or of several."""
    if not running.ranks.several:
        return StepGradients(running)
    return (StepGradientsOfShards if running.sharded else StepGradientsOfRanks)(running)
