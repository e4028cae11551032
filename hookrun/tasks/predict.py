"""task=predict: runs a split through the model in order; predictions and captures are stored by sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from hookrun.store.format import PREDICTED
from hookrun.tasks.evaluate import EvaluateTask

if TYPE_CHECKING:
    from hookrun.tasks.run.batches import Batch
    from hookrun.tasks.run.context import RunContext


class PredictTask(EvaluateTask):
    """Writes the model's outputs to predictions/.

    metrics: the metrics to compute, the loss only if it is listed; null: none
    tokens:  for sequences: the positions at which metrics are computed; null: all with a token to predict
    """

    task_name: ClassVar[str] = "predict"
    scores: ClassVar[bool] = False

    def store(self, context: RunContext) -> Callable[[Batch, Any], None]:
        """A function that writes the output for a batch to predictions/."""
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

        return store
