"""The gradients of a step of several processes, which split each micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from hookrun.engine.runtime.rng import derived_seed
from hookrun.run.passes.batches import Batch
from hookrun.run.passes.context import RunContext
from hookrun.run.training.step import MicroBatchResult, Share, StepGradients


class StepGradientsOfRanks(StepGradients):
    """In several processes: torch's DistributedDataParallel sums the gradients of the ranks.

    Each rank's loss is weighted by its share of the samples, so that the sum is the gradient of the loss over all
    samples, and `backward` and `output_grad` hooks see the same gradient of a row as in one process. Hooks on
    parameter gradients run on the sum.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self._wrap()
        self._parameters = [each for each in context.model.parameters() if each.requires_grad]
        self._reduced = context.reduced
        if not self.ranks.is_main:  # otherwise dropout would draw the same mask on every rank
            torch.manual_seed(derived_seed(context.settings.seed, self.ranks.rank))

    def _wrap(self) -> None:
        self._rows = _Rows(self.context)
        self._ddp = DistributedDataParallel(self._rows, find_unused_parameters=True)
        self._ddp.register_comm_hook(None, _summed)

    def shares(self, group: Sequence[Batch]) -> Sequence[Share]:
        """The factor of each micro-batch's loss: this rank's share of the rows of all ranks."""
        ignored = self.context.prepared.loss.ignored
        if group[0].data.of_tokens or (ignored is not None and group[0].labels.dim() > 1):
            weights = [float(batch.weight_without(ignored)) for batch in group]
            whole = max(sum(self.ranks.total(weights)), 1)
            return [weight / whole for weight in weights]
        whole = sum(batch.whole for batch in group)
        sums = self.context.prepared.loss.sums
        return [(batch.whole if sums else len(batch.ids)) / whole for batch in group]

    def compute(self, batch: Batch, share: Share, *, last: bool) -> MicroBatchResult:
        """The same; gradients are summed over the ranks, at the latest with the last micro-batch."""
        earlier: list[tuple[nn.Parameter, Tensor | None]] = []
        if self._reduced.of_each_part:  # then `grad` is to have the gradient of this micro-batch alone
            for parameter in self._parameters:
                earlier.append((parameter, parameter.grad))
                parameter.grad = None
        sums = last or bool(self._reduced.of_each_part)
        result = self._result(batch, share, sums=sums)
        if sums:
            self._reduced.run(earlier)
        self.context.after(batch)
        return result

    def _result(self, batch: Batch, share: Share, *, sums: bool) -> MicroBatchResult:
        """The result of a forward and a backward pass; sums: gradients are summed over the ranks."""
        if not sums and not len(batch.ids):
            return None, None
        with nullcontext() if sums else self._ddp.no_sync():
            loss = self._ddp(batch)
            result = self._rows.result
            self._rows.result = (None, None)
            self.context.scaler.scale(loss * share).backward()
        return result

    def losses(self, losses: Sequence[Tensor | None], shares: Sequence[Share]) -> list[Tensor]:
        """The weighted loss of each micro-batch, summed over all ranks: finite if the losses of all ranks are."""
        parts = [0.0] * len(losses)
        for number, (loss, share) in enumerate(zip(losses, shares, strict=True)):
            if loss is not None:
                parts[number] = float(loss) * float(share)
        return [torch.tensor(part) for part in self.ranks.total(parts)]


class StepGradientsOfShards(StepGradientsOfRanks):
    """In several processes with sharded parameters: torch's fully_shard sums the gradients of the ranks.

    Every rank takes part in every pass; a rank without rows computes a row of another rank, with loss factor 0.
    """

    def _wrap(self) -> None:
        """Nothing to do: the model was sharded before the optimizer was made."""

    def _result(self, batch: Batch, share: Share, *, sums: bool) -> MicroBatchResult:
        """The same; gradients are summed over the ranks with each micro-batch."""
        if batch.pattern is None:
            return self._computed(batch, share)
        with self.context.silently(edit=True):
            self._computed(batch.pattern, 0.0)
        return None, None

    def _computed(self, batch: Batch, share: Share) -> MicroBatchResult:
        output = self.context.forward(batch)
        loss = self.context.loss(output, batch)
        self.context.scaler.scale(loss * share).backward()
        return output, loss


class _Rows(nn.Module):
    """The loss of the rank's rows, as the module that DistributedDataParallel wraps.

    Since its only output is the loss, DistributedDataParallel treats every parameter without influence on the loss as
    unused, whatever else the model returns. A rank without rows takes part through the parameter `anchor`: its model
    and hooks do not run, since many models cannot compute an empty batch.

    result: of the last call
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__()
        self.model = context.model
        self.anchor = nn.Parameter(torch.zeros((), device=context.prepared.device))
        self._context = context
        self.result: MicroBatchResult = (None, None)

    def forward(self, batch: Batch) -> Tensor:
        """The mean loss of the rows, a tensor without dimensions."""
        if not len(batch.ids):
            return self.anchor * 0
        output = self._context.forward(batch)
        loss = self._context.loss(output, batch)
        self.result = (output, loss)
        return loss


def _summed(state, bucket):  # type: ignore[no-untyped-def]  # torch does not accept string annotations
    """Sum the gradients of all ranks; by default DistributedDataParallel would average them."""
    work = distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def step_gradients(context: RunContext) -> StepGradients:
    """The object that computes the run's gradients: for one process, several, or sharded parameters."""
    if not context.ranks.several:
        return StepGradients(context)
    if context.sharded:
        return StepGradientsOfShards(context)
    return StepGradientsOfRanks(context)
