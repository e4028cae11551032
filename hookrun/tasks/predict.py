"""task=predict: runs a split through the model in order; predictions and captures are stored by sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hookrun import data
from hookrun.errors import HookrunError
from hookrun.spec import Settings
from hookrun.spec.metric import Metrics, asked
from hookrun.spec.objective import Direction
from hookrun.spec.tokens import TokensClause
from hookrun.store.format import PREDICTED
from hookrun.tasks.backward import TaskWithBackward

if TYPE_CHECKING:
    from hookrun.tasks.run.context import Resumable, RunContext


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
        if not len(batches):
            raise HookrunError(f"the data has no samples in its {self.split} split")
        average = context.average()
        wants_loss = asked(self.metrics, LOSS)
        forward = self.forward(context)
        clock = context.hooks.clock
        held: dict[str, Resumable] = {"average": average, "names": names}
        with context.evaluating(batches, self.name, held) as (passed, _):
            for batch in passed:
                with context.logged(clock.step):
                    output = forward(batch)
                if len(batch.ids):  # otherwise other ranks have all of its rows
                    context.run_dir.predictions.add(
                        *PREDICTED,
                        output,
                        sample_ids=batch.ids,
                        epoch=clock.epoch,
                        step=clock.step,
                        call=0,
                        split=batch.split,
                    )
                    if self.metrics is not None:
                        loss = context.loss(output, batch) if wants_loss else None
                        context.measure(average, loss, output, batch)
                    names.write(batch, output)
                context.hooks.step()
        names.write_pictures()
        values = context.read(self.split, context.sum_over_ranks(average)) if self.metrics is not None else {}
        context.conclude(self.split, {"samples": names.seen.total(), **values})
