"""Gradients without training: `task.backward` runs one backward pass for each batch, from a score of its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from hookrun.errors import Problem, SpecError
from hookrun.spec import HookSpec, Settings
from hookrun.spec.task import LOGIT_DIFFERENCE, BackwardPass
from hookrun.tasks.under_hooks import TaskOfSplits

if TYPE_CHECKING:
    from hookrun.data import DataInfo
    from hookrun.tasks.metrics.losses import TrainLoss
    from hookrun.tasks.run.backward_pass import Score
    from hookrun.tasks.run.batches import Batch
    from hookrun.tasks.run.context import RunContext
    from hookrun.tasks.training.parameter_groups import Trained


WHERE = "task.backward"


def score_problems(backward: BackwardPass, where: str, info: DataInfo | None) -> list[Problem]:
    """The problems of a score: data without what it needs, or a function that cannot be loaded.

    where: the key path of the section
    info:  None if the data is invalid
    """
    where = f"{where}.score"
    if backward.is_own:
        from hookrun.tasks.run.backward_pass import own_score

        try:
            own_score(backward, where)
        except SpecError as error:
            return list(error.errors)
    if info is None:
        return []
    target, of_tokens = info.target, info.tokenizer is not None
    if backward.score == LOGIT_DIFFERENCE and not (of_tokens and info.has_wrong):
        text = f"{backward.score!r} needs a right and a wrong answer, and the data {info.name!r} does not have them"
        return [Problem(where, text, "use data=names, or data=prompts with the fields `answer` and `wrong`")]
    is_label = target is not None and not target.dtype.is_floating_point and (of_tokens or not target.shape)
    if backward.score == "label" and not is_label:
        there = f"has targets {target}" if target is not None else "has no targets"
        text = f"'label' needs a class label of each sample, and the data {info.name!r} {there}"
        return [Problem(where, text, "use top, class, output or loss")]
    return []


class TaskWithBackward(TaskOfSplits):
    """Base of the tasks that may run a backward pass without training anything.

    backward: the score that the backward pass starts from; None: no backward pass
    """

    backward: BackwardPass | None = None

    def scores_with_loss(self) -> bool:
        """Whether the loss is computed; it is if `backward` starts from the loss."""
        return super().scores_with_loss() or (self.backward is not None and self.backward.score == "loss")

    def needs_output(self) -> str | None:
        """The keys that ask for metrics or gradients; captures alone need no output."""
        return next(
            (f"task.{key}" for key in ("metrics", "backward") if getattr(self, key) is not None), None
        )

    def idle(self, hook: HookSpec) -> tuple[str, str] | None:
        """(why the hook never fires, what to do); None if it fires. Without `backward`, gradient hooks do not fire."""
        needs = super().idle(hook)
        if needs is None or self.backward is None:
            return (needs[0], f"set task.backward, {needs[1]}") if needs is not None else None
        if hook.hook_type.phase != "step":
            return None
        return f"needs an optimizer step, which task={self.name} does not make", needs[1]

    def starts_from(self, loss: TrainLoss) -> Score | None:
        """The score that the backward pass starts from; None: no backward pass."""
        from hookrun.tasks.run.backward_pass import Scoring

        return Scoring(self.backward, WHERE, loss) if self.backward is not None else None

    def forward(self, context: RunContext) -> Callable[[Batch], Any]:
        """The function batch -> output of the model; it runs the backward pass too, if `backward` is set."""
        from hookrun.tasks.run.backward_pass import Scoring, forward_and_backward

        if self.backward is None:
            return context.forward
        scoring = Scoring(self.backward, WHERE, context.prepared.loss, context.measuring)
        return partial(forward_and_backward, context, scoring)

    def problems(self, settings: Settings, info: DataInfo | None) -> Iterator[Problem]:
        """The common problems of the settings, and those of the score."""
        yield from super().problems(settings, info)
        yield from score_problems(self.backward, WHERE, info) if self.backward is not None else ()

    def lines(self, settings: Settings, trained: Trained | None) -> Iterator[str]:
        """One line about the backward pass."""
        if self.backward is not None:
            yield f"one backward pass for each batch, from {self.backward} summed over its samples"

    def remarks(self, settings: Settings, hooks: tuple[HookSpec, ...]) -> Iterator[str]:
        """Warnings: no hook sees the gradients, fp16 may underflow, parameter gradients are sums over a batch."""
        yield from super().remarks(settings, hooks)
        if self.backward is None:
            return
        enabled = [hook for hook in hooks if hook.keys.enabled]
        if not any(hook.hook_type.needs_backward and self.idle(hook) is None for hook in enabled):
            yield "task.backward: no hook sees its gradients"
        if settings.compute.precision == "fp16":
            yield "task.backward: without a gradient scaler fp16 gradients below 6e-8 are 0; bf16 and fp32 keep them"
        yield from (
            f"{hook.name}: the gradient of a parameter is one for each batch, the sum over its samples; "
            "data.batch_size=1 makes it one for each sample"
            for hook in enabled
            if hook.on_parameters
            and hook.hook_type.gradient
            and hook.action.captures
            and self.idle(hook) is None
        )
