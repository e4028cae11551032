"""task=train: trains the model, validates after each epoch, and saves the best and the last checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from hookrun import data
from hookrun.engine.spec.tokens import TokensClause
from hookrun.run.experiment.settings import Settings
from hookrun.run.tasks.under_hooks import TaskUnderHooks
from hookrun.store.objective import MOST_ROWS, Direction, Metrics, MostRows

if TYPE_CHECKING:
    from hookrun.run.passes.context import RunContext


class TrainTask(TaskUnderHooks):
    """Trains the model as configured in the section `train`.

    metrics:  the metrics to compute in addition to the loss; null: the accuracy, if targets are labels
    tokens:   for sequences: the positions at which loss and metrics are computed; null: all with a token to predict
    max_rows: for metrics over the whole split: how many samples or tokens are kept at most
    """

    task_name: ClassVar[str] = "train"
    is_default: ClassVar[bool] = True
    trains: ClassVar[bool] = True
    splits_batches: ClassVar[bool] = True
    scores: ClassVar[bool] = True
    refuses: ClassVar[Mapping[str, str]] = {
        "backward": "task=train has a backward pass of its own, from train.loss: use task=predict or evaluate"
    }

    metrics: Metrics = None
    tokens: TokensClause | None = None
    max_rows: MostRows = MOST_ROWS

    def measures(self, settings: Settings) -> dict[str, Direction | None]:
        """Loss and metrics of the training epochs and, if the data has a validation split, of the validation."""
        from hookrun.run.experiment.metrics.metrics import measured

        info = data.describe(settings.data, "train")
        splits = ("val", "train") if info.sizes["val"] != 0 else ("train",)
        return measured(self.metrics, settings.train, info, splits, with_loss=True, training="train")

    def perform(self, context: RunContext) -> None:
        """Train until all epochs or steps are finished, or a check stops the run."""
        from hookrun.run.training.loop import train

        train(context)
