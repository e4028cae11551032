"""task=predict: a split through the model in order; predictions and captures are keyed by sample."""

from __future__ import annotations

from hookrun.errors import HookrunError
from hookrun.store.format import PREDICTED
from hookrun.tasks.loop.batches import Batches
from hookrun.tasks.loop.running import Running


def predict(running: Running) -> None:
    """Run `task.split` through the model and write its outputs to predictions/."""
    split = running.settings.task.split
    batches = Batches(running.prepared, split)
    if not len(batches):
        raise HookrunError(f"the data has no samples in its {split} split")
    samples = 0
    with running.evaluating(batches, "predict") as (passed, _):
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
                split=split,
            )
            samples += len(batch.ids)
            running.hooks.step()
            if running.stopped:
                break
    running.log(split, {"samples": samples})


def evaluate(running: Running) -> None:
    """task=evaluate: loss and accuracy on `task.split`."""
    split = running.settings.task.split
    batches = Batches(running.prepared, split)
    running.log(split, running.evaluate(batches, split, "evaluate"))
