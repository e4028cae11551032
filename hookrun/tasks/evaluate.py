"""task=evaluate: loss and accuracy of the model on one split of the data."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hookrun.spec import Settings
from hookrun.spec.objective import Direction
from hookrun.tasks.under_hooks import TaskOfOneSplit, data_of

if TYPE_CHECKING:
    from hookrun.tasks.loop.running import Running


class EvaluateTask(TaskOfOneSplit):
    """Computes `train.loss` and the accuracy."""

    task_name: ClassVar[str] = "evaluate"
    scores: ClassVar[bool] = True

    def measures(self, settings: Settings) -> dict[str, Direction | None]:
        """Loss and accuracy of the split."""
        from hookrun.tasks.loop.metrics import measured

        return measured(settings.train, data_of(settings, self.split), (self.split,))

    def perform(self, running: Running) -> None:
        """Log the means over all samples."""
        from hookrun.tasks.loop.batches import Batches

        batches = Batches(running.prepared, self.split)
        running.conclude(self.split, running.evaluate(batches, self.split, self.name), "epoch")
