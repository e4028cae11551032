"""task=predict: runs a split through the model in order; predictions and captures are stored by sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from hookrun import data
from hookrun.spec import Settings
from hookrun.spec.objective import Direction, Metrics, asked
from hookrun.spec.tokens import TokensClause
from hookrun.store.format import PREDICTED
from hookrun.tasks.backward import TaskWithBackward

if TYPE_CHECKING:
    from hookrun.tasks.run.batches import Batch
    from hookrun.tasks.run.context import RunContext


class PredictTask(TaskWithBackward):
    """Writes the model's outputs to predictions/.

    metrics: the metrics to compute, the loss only if it is listed; null: none
    tokens:  for sequences: the positions at which metrics are computed; null: all with a token to predict
    """

    task_name: ClassVar[str] = "predict"
    splits_batches: ClassVar[bool] = True

    metrics: Metrics = None
    tokens: TokensClause | None = None

    def measures(self, settings: Settings) -> dict[str, Direction | None]:
        """The means of the metrics over the split."""
        from hookrun.tasks.metrics.metrics import measured

        if self.metrics is None:
            return {}
        info = data.describe(settings.data, self.splits[0])
        return measured(self.metrics, settings.train, info, (self.split,), with_loss=False)

    def perform(self, context: RunContext) -> None:
        """Run the split through the model. Raises HookrunError if it has no samples."""
        from hookrun.tasks.metrics.metrics import LOSS
        from hookrun.tasks.run.batches import BatchesOfSplits

        batches = BatchesOfSplits(context.prepared, self.splits, context.ranks)
        names = context.sample_names(batches.parts)
        clock = context.hooks.clock

        def store(batch: Batch, output: Any) -> None:
            context.run_dir.predictions.add(
                *PREDICTED,
                output,
                sample_ids=batch.ids,
                epoch=clock.epoch,
                step=clock.step,
                call=0,
                split=batch.split,
            )

        values = context.evaluate(
            batches,
            self.split,
            self.name,
            forward=self.forward(context),
            names=names,
            store=store,
            measures=self.metrics is not None,
            with_loss=asked(self.metrics, LOSS),
        )
        context.conclude(self.split, {"samples": names.seen.total(), **values})
