"""`train.on_nonfinite`: prevents optimizer steps with a loss or gradients that are not finite, and finds the source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from hookrun.errors import HookrunError
from hookrun.tasks.run.batches import Batch
from hookrun.tasks.run.context import RunContext
from hookrun.tasks.training.finite import all_finite, not_finite
from hookrun.tasks.training.nonfinite_source import UNKNOWN, BeforeStep, source_of

WHERE = "train.on_nonfinite"

Outcome = Literal["stepped", "overflow", "skipped"]
STEPPED: Outcome = "stepped"
OVERFLOW: Outcome = "overflow"
"""The gradient scaler itself skipped the step, and continues with a smaller scale."""
SKIPPED: Outcome = "skipped"
"""The loss or a gradient was not finite, and the optimizer did not step."""

LEAST_SCALE = 1.0
"""An overflow at this scale or below is not caused by the scaling, so a smaller scale would not help."""

MOST_REPORTED = 5
"""How many skipped steps are investigated and reported one by one; later ones are only counted."""

_HINT = (
    "a smaller learning rate, train.clip_grad_norm or a `check` hook may help; "
    f"{WHERE}: skip omits such steps, stop saves and ends the run"
)


class _NotFinite(Exception):
    """Raised inside `optimizer.step()`, after all hooks on gradients and before a parameter changes."""


class FiniteSteps:
    """Steps the optimizer if the losses and gradients of the step are finite.

    A skipped step counts for hooks, like one that a gradient scaler skips, so `when: {step: ...}` means the same
    batches in every run. The optimizer, a schedule by steps and the average of the weights do not advance.

    losses:  the detached losses of the current step's micro-batches
    skipped: the number of steps skipped so far
    """

    def __init__(self, context: RunContext, optimizer: Optimizer) -> None:
        prepared = context.prepared
        own_code = context.settings.model.factory is not None or bool(prepared.plan.code)
        own_code |= any(hook.code for hook in prepared.plan.hooks)
        self.losses = list[Tensor]()
        self.skipped = 0
        self._context = context
        self._optimizer = optimizer
        self._group: Sequence[Batch] = ()
        self._in_epoch = 0
        self._before = BeforeStep(context.model, context.hooks, own_code=own_code)
        optimizer.register_step_pre_hook(self._before_step)  # torch runs it after the hooks of the experiment

    def state_dict(self) -> dict[str, int]:
        """The number of skipped steps, in the run and in this epoch."""
        return {"skipped": self.skipped, "told": self._in_epoch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Replace the counts by saved ones."""
        self.skipped, self._in_epoch = state["skipped"], state["told"]

    def begin(self, group: Sequence[Batch]) -> None:
        """Prepare for a step over these micro-batches."""
        self.losses.clear()
        self._group = group
        self._before.take()

    def step(self) -> Outcome:
        """Step the optimizer, through the gradient scaler; gradients are already unscaled and clipped.

        Raises HookrunError if the loss or a gradient is not finite and the policy is `error`.
        """
        scaler = self._context.scaler
        if not scaler.is_enabled():
            try:
                self._optimizer.step()
            except _NotFinite:
                return self._left_out()
            return STEPPED
        scale = scaler.get_scale()
        try:
            # Checked here too, since a scaler that overflows does not call the hook.
            if not all_finite(self.losses):
                raise _NotFinite
            scaler.step(self._optimizer)
        except _NotFinite:
            scaler.update(scale)  # needed before the scaler's next step; keeps the scale
            return self._left_out()
        scaler.update()
        if scaler.get_scale() >= scale:
            return STEPPED
        return self._left_out() if scale <= LEAST_SCALE else OVERFLOW

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """torch's pre-hook of the optimizer."""
        overflow = getattr(optimizer, "found_inf", None)  # set if the optimizer itself skips the step
        if overflow is not None and overflow.item():
            return
        groups = [group["params"] for group in optimizer.param_groups]
        gradients = [each.grad for group in groups for each in group if each.grad is not None]
        finite = all_finite([*self.losses, *gradients])
        if self._context.sharded:  # each rank has only parts of the gradients
            finite = not self._context.ranks.largest([not finite])[0]
        if not finite:
            raise _NotFinite

    def _left_out(self) -> Outcome:
        context = self._context
        policy, clock = context.settings.train.on_nonfinite, context.hooks.clock
        # A check hook has found it already and ends the run. The ranks agree on it, since they communicate below.
        if context.ranks.largest([context.stopped])[0]:
            return SKIPPED
        self.skipped += 1
        self._in_epoch += 1
        if policy == "skip" and self.skipped > MOST_REPORTED:
            self._before.restore_buffers()
            return SKIPPED
        wrong = next((number for number, loss in enumerate(self.losses) if not all_finite([loss])), None)
        what = "a gradient is not finite" if wrong is None else f"the loss is {float(self.losses[wrong])}"
        self._optimizer.zero_grad(set_to_none=True)  # frees memory to repeat the step
        source = f"{UNKNOWN}: parameters are sharded over the ranks"
        if not context.sharded:
            source = source_of(context, self._before, self._group, wrong)
            if context.ranks.several:  # each has repeated the step with its own rows
                sources = enumerate(context.ranks.gathered(source))
                known = (f"rank {rank}: {text}" for rank, text in sources if UNKNOWN not in text)
                source = next(known, source)
        text = f"epoch {clock.epoch}, step {clock.step}: {what}: {source}"
        self._before.restore_buffers()
        if policy == "error":
            raise HookrunError(f"{WHERE}: {text}\n    {_HINT}")
        if policy == "stop":
            context.sink.stop = f"{WHERE}: {text}"
            return SKIPPED
        more = " (later ones are only counted)" if self.skipped == MOST_REPORTED else ""
        context.screen.note([f"{WHERE}: skipped a step: {text}{more}"])
        return SKIPPED

    def end_epoch(self) -> dict[str, float]:
        """Print how many steps of the epoch were skipped; returns the entry for metrics.jsonl, empty without any."""
        count, self._in_epoch = self._in_epoch, 0
        if not count or self._context.settings.train.on_nonfinite != "skip":
            return {}
        context, epoch = self._context, self._context.hooks.clock.epoch
        lines = [f"{WHERE}: steps skipped in epoch {epoch}: {count}, so far: {self.skipped}"]
        parameters = dict(context.model.named_parameters())
        found = [bool(not_finite(parameter)) for parameter in parameters.values()]
        if context.sharded:  # each rank has only its parts
            found = [bool(each) for each in context.ranks.largest(found)]
        bad = [name for name, is_bad in zip(parameters, found, strict=True) if is_bad]
        if bad:
            lines.append(f"{WHERE}: {bad[0]} itself is not finite: skipping steps does not help")
        context.screen.note(lines)
        return {"skipped_steps": count}
