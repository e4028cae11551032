"""task=predict: one split through the model in order; predictions and captures are keyed by sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hookrun.errors import HookrunError
from hookrun.store.format import PREDICTED
from hookrun.tasks.under_hooks import TaskOfSplits

if TYPE_CHECKING:
    from hookrun.tasks.loop.running import Running


class PredictTask(TaskOfSplits):
    """Writes the model's outputs to predictions/."""

    task_name: ClassVar[str] = "predict"

    def perform(self, running: Running) -> None:
        """Run the split through the model. Raises HookrunError where it has no samples."""
        from hookrun.tasks.loop.batches import BatchesOfSplits
        from hookrun.tasks.loop.sample_names import SampleNames

        batches = BatchesOfSplits(running.prepared, self.parts)
        names = SampleNames(running.run_dir, batches.parts, running.prepared.data.num_classes)
        if not len(batches):
            raise HookrunError(f"the data has no samples in its {self.split} split")
        samples = 0
        with running.evaluating(batches, self.name) as (passed, _):
            for number, batch in enumerate(passed):
                with running.logged(number):
                    output = running.forward(batch)
                clock = running.hooks.clock
                running.run_dir.predictions.add(
                    *PREDICTED,
                    output,
                    sample_ids=batch.ids,
                    epoch=clock.epoch,
                    step=clock.step,
                    call=0,
                    split=batch.split,
                )
                names.write(batch, output)
                samples += len(batch.ids)
                running.hooks.step()
                if running.stopped:
                    break
        running.conclude(self.split, {"samples": samples})
