"""task=evaluate: loss and accuracy of the model on one split of the data.

`task.backward` runs one backward pass for each batch, from a score of its samples: gradients without training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from hookrun import data
from hookrun.engine.spec import HookSpec
from hookrun.engine.spec.tokens import TokensClause
from hookrun.run.experiment.settings import Settings
from hookrun.run.experiment.task_keys import BackwardPass
from hookrun.run.tasks.under_hooks import TaskOfSplits
from hookrun.store.format import PREDICTED
from hookrun.store.objective import MOST_ROWS, Direction, Metrics, MostRows

if TYPE_CHECKING:
    from hookrun.run.experiment.prepared import Prepared
    from hookrun.run.passes.batches import Batch
    from hookrun.run.passes.context import RunContext


WHERE = "task.backward"


class EvaluateTask(TaskOfSplits):
    """Computes metrics.

    metrics:  the metrics to compute; null: `train.loss` if it is given; of labels cross-entropy and accuracy
    tokens:   for sequences: the positions at which loss and metrics are computed; null: all with a token to predict
    max_rows: for metrics over the whole split: how many samples or tokens are kept at most
    backward: the score that a backward pass without training starts from; null: no backward pass
    """

    task_name: ClassVar[str] = "evaluate"
    scores: ClassVar[bool] = True
    splits_batches: ClassVar[bool] = True

    backward: BackwardPass | None = None
    metrics: Metrics = None
    tokens: TokensClause | None = None
    max_rows: MostRows = MOST_ROWS

    def measures(self, settings: Settings) -> dict[str, Direction | None]:
        """The means of the metrics over the split."""
        from hookrun.run.experiment.metrics.metrics import measured

        if not self.scores and self.metrics is None:
            return {}
        return measured(
            self.metrics,
            settings.train,
            data.describe(settings.data, self.splits[0]),
            (self.split,),
        )

    def scored(self) -> tuple[str, BackwardPass] | None:
        """The key path and the score of `task.backward`."""
        return None if self.backward is None else (WHERE, self.backward)

    def needs_output(self) -> str | None:
        """The keys that ask for metrics or gradients; captures alone need no output."""
        if self.metrics is not None:
            return "task.metrics"
        return None if self.backward is None else "task.backward"

    def idle(self, hook: HookSpec) -> tuple[str, str] | None:
        """(why the hook never fires, what to do); None if it fires. Without `backward`, gradient hooks do not fire."""
        idle = super().idle(hook)
        if idle is None:
            return None
        why, hint = idle
        if self.backward is None:
            return why, f"set task.backward, {hint}"
        if hook.hook_type.phase != "step":
            return None
        return f"needs an optimizer step, which task={self.name} does not make", hint

    def lines(self, prepared: Prepared) -> Iterator[str]:
        """One line about the backward pass."""
        if self.backward is not None:
            yield f"one backward pass for each batch, from {self.backward} summed over its samples"

    def remarks(self, settings: Settings, hooks: tuple[HookSpec, ...]) -> Iterator[str]:
        """Warnings: no hook sees the gradients, fp16 may underflow, parameter gradients are sums over a batch."""
        yield from super().remarks(settings, hooks)
        if self.backward is None:
            return
        firing = [hook for hook in hooks if hook.keys.enabled and self.idle(hook) is None]
        if not any(hook.hook_type.needs_backward for hook in firing):
            yield "task.backward: no hook sees its gradients"
        if settings.compute.precision == "fp16":
            yield "task.backward: without a gradient scaler fp16 gradients below 6e-8 are 0; bf16 and fp32 keep them"
        for hook in firing:
            if hook.hook_type.on_parameters and hook.hook_type.gradient and hook.action.captures:
                yield (
                    f"{hook.name}: the gradient of a parameter is one for each batch, the sum over its samples; "
                    "data.batch_size=1 makes it one for each sample"
                )

    def perform(self, context: RunContext) -> None:
        """Run the split through the model, and log the means. Raises HookrunError if it has no samples."""
        from hookrun.run.experiment.metrics.metrics import LOSS
        from hookrun.run.passes.backward_pass import Scoring, forward_and_backward
        from hookrun.run.passes.batches import BatchesOfSplits

        batches = BatchesOfSplits(context.prepared, self.splits, context.ranks)
        names = context.sample_names(batches.parts)
        metrics = context.prepared.metrics
        forward: Callable[[Batch], Any] = context.forward
        if self.backward is not None:
            scoring = Scoring(self.backward, WHERE, context.prepared.loss, context.measuring)
            forward = partial(forward_and_backward, context, scoring)
        values = context.evaluate(
            batches,
            self.split,
            self.name,
            forward=forward,
            names=names,
            # task=predict stores the outputs and does not score them
            store=None if self.scores else partial(write_predictions, context),
            measures=bool(metrics),
            with_loss=any(metric.name == LOSS for metric in metrics),
        )
        if metrics and self.scores:
            context.conclude(self.split, values, "epoch")
        else:
            context.conclude(self.split, {"samples": names.seen.total(), **values})


def write_predictions(context: RunContext, batch: Batch, output: Any) -> None:
    """Write the output for a batch to predictions/, as task=predict does.

    The output for a sample that is not batched is its row. A list for a list of samples belongs to no single sample.
    """
    from torch import Tensor

    from hookrun.engine.values.containers import rebuild

    clock = context.hooks.clock
    ids: Tensor | None = batch.ids
    if context.settings.data.batch_size is None:
        output = rebuild(output, lambda leaf: leaf[None] if isinstance(leaf, Tensor) else leaf)
    elif isinstance(output, list) and context.settings.data.unstacked:
        ids = None
    context.run_dir.predictions.add(
        *PREDICTED,
        output,
        sample_ids=ids,
        epoch=clock.epoch,
        step=clock.step,
        call=0,
        split=batch.split,
    )
