"""task=evaluate: loss and accuracy of the model on one split of the data."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hookrun import data
from hookrun.spec import Settings
from hookrun.spec.objective import Direction, Metrics
from hookrun.spec.tokens import TokensClause
from hookrun.tasks.backward import TaskWithBackward

if TYPE_CHECKING:
    from hookrun.tasks.run.context import RunContext


class EvaluateTask(TaskWithBackward):
    """Computes `train.loss` and metrics.

    metrics: the metrics to compute in addition to the loss; null: the accuracy, if targets are labels
    tokens:  for sequences: the positions at which loss and metrics are computed; null: all with a token to predict
    """

    task_name: ClassVar[str] = "evaluate"
    scores: ClassVar[bool] = True
    splits_batches: ClassVar[bool] = True

    metrics: Metrics = None
    tokens: TokensClause | None = None

    def measures(self, settings: Settings) -> dict[str, Direction | None]:
        """The means of loss and metrics over the split."""
        from hookrun.tasks.metrics.metrics import measured

        return measured(
            self.metrics, settings.train, data.describe(settings.data, self.splits[0]), (self.split,)
        )

    def perform(self, context: RunContext) -> None:
        """Compute and log the means over all samples."""
        from hookrun.tasks.run.batches import BatchesOfSplits

        batches = BatchesOfSplits(context.prepared, self.splits, context.ranks)
        names = context.sample_names(batches.parts)
        values = context.evaluate(batches, self.split, self.name, forward=self.forward(context), names=names)
        context.conclude(self.split, values, "epoch")
