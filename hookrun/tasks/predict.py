"""task=predict: one split through the model in order; predictions and captures are keyed by sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hookrun.errors import HookrunError
from hookrun.store.format import PREDICTED
from hookrun.tasks.backward import TaskWithBackward

if TYPE_CHECKING:
    from hookrun.tasks.loop.running import Running


class PredictTask(TaskWithBackward):
    """Writes the model's outputs to predictions/."""

    task_name: ClassVar[str] = "predict"

    def perform(self, running: Running) -> None:
        """Run the split through the model. Raises HookrunError where it has no samples."""
        from hookrun.tasks.loop.batches import Batches

        batches = Batches(running.prepared, self.split)
        if not len(batches):
            raise HookrunError(f"the data has no samples in its {self.split} split")
        samples, forward = 0, self.forward(running)
        with running.evaluating(batches, self.name) as (passed, _):
            for number, batch in enumerate(passed):
                with running.logged(number):
                    output = forward(batch)
                clock = running.hooks.clock
                running.run_dir.predictions.add(
                    *PREDICTED,
                    output,
                    sample_ids=batch.ids,
                    epoch=clock.epoch,
                    step=clock.step,
                    call=0,
                    split=self.split,
                )
                samples += len(batch.ids)
                running.hooks.step()
                if running.stopped:
                    break
        running.conclude(self.split, {"samples": samples})
