"""task=evaluate: loss and accuracy of the model on one split of the data."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hookrun.tasks.under_hooks import TaskOfSplits

if TYPE_CHECKING:
    from hookrun.tasks.loop.running import Running


class EvaluateTask(TaskOfSplits):
    """Computes `train.loss` and the accuracy."""

    task_name: ClassVar[str] = "evaluate"
    scores: ClassVar[bool] = True

    def perform(self, running: Running) -> None:
        """Log the means over all samples."""
        from hookrun.tasks.loop.batches import BatchesOfSplits
        from hookrun.tasks.loop.sample_names import SampleNames

        batches = BatchesOfSplits(running.prepared, self.parts)
        names = SampleNames(running.run_dir, batches.parts, running.prepared.data.num_classes)
        running.conclude(self.split, running.evaluate(batches, self.split, self.name, names))
