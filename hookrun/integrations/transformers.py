"""The transformers callback: hooks, clock, run directory and report follow the Trainer.

The Trainer has no event for an exception, for the loss of a batch, nor for the beginning of `evaluate` and `predict`.
So importing this module wraps `Trainer.train`, `Trainer.training_step`, `Trainer.evaluate` and `Trainer.predict`;
without this callback the wrappers change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

from hookrun.integrations import needing

with needing("transformers", "transformers"):
    from transformers import Trainer, TrainerCallback

from hookrun.engine.runtime.hooks.base import listen
from hookrun.errors import HookrunError
from hookrun.integrations.recording import LoopFollower

_METHODS = ((Trainer.train, "train"), (Trainer.evaluate, "val"), (Trainer.predict, "test"))
"""Method of the Trainer -> the split in metrics.jsonl."""


class Callback(LoopFollower, TrainerCallback):
    """``Trainer(callbacks=[Callback(spec, run_dir="outputs/mine")])``: each train, evaluate or predict is one run.

    The hooks are installed on the Trainer's model, so that selectors are its names, before its optimizer is made. The
    step is the Trainer's `global_step`, in an evaluation the batch; accumulation and the gradient scaler are
    accelerate's. What the Trainer logs goes to metrics.jsonl.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._split = "train"

    @contextmanager
    def during(self, trainer: Any, split: str) -> Iterator[None]:
        """A context for a method of the Trainer: a run, or within a run a pass in evaluation mode."""
        with ExitStack() as stack:
            stack.callback(setattr, self, "_split", self._split)
            self._split = split
            if self.following is None:  # otherwise it is evaluate, called by train
                self.begin(
                    trainer.model, getattr(trainer.accelerator, "scaler", None), trains=split == "train"
                )
                stack.push(lambda kind, error, trace: self.end(error))
                arrived = partial(self._arrived, trainer)
                stack.callback(listen(trainer.model, arrived, prepend=True, with_kwargs=True).remove)
            if split != "train":
                stack.enter_context(self.evaluating())
            yield

    # ---- events of the Trainer ---------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """HookrunError if the Trainer trains another model than the hooked one, which `model_init` creates."""
        if self.following is not None and model is not None and not self.following.is_on(model):
            raise HookrunError(
                "the Trainer made another model after the hooks were installed: give it `model=`, not `model_init=`"
            )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the epoch from the Trainer's, which is a fraction."""
        self.epoch(int((state.epoch or 0) + 1e-6))

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the step to the Trainer's."""
        if self.following is not None:
            self.following.clock.place(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Set the step to the Trainer's, and stop if a check says so."""
        self.on_step_begin(args, state, control)
        control.should_training_stop = control.should_training_stop or self.stops
        return control

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End a batch of an evaluation."""
        self.evaluated_batch()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Write what the Trainer logs."""
        self.write(self._split, dict(logs or {}), state.global_step)

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """Write the metrics of `predict`, which the Trainer does not log."""
        self.write(self._split, dict(metrics or {}), state.global_step)

    def _arrived(self, trainer: Any, module: Any, args: Any, kwargs: Any) -> None:
        """A batch reaches the model; the Trainer has no event with the batch."""
        hooks = self.following
        if hooks is None:
            return
        if hooks.mode == "train":
            hooks.accumulating = not trainer.accelerator.sync_gradients
        self.batch((args, kwargs), self._split if self._split in ("train", "val") else None)


def _followed(method: Callable[..., Any], split: str) -> Callable[..., Any]:
    """Wrap a method of the Trainer so that its callbacks of this module follow it."""

    @wraps(method)
    def followed(self: Any, *args: Any, **options: Any) -> Any:
        with ExitStack() as stack:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, Callback):
                    stack.enter_context(callback.during(self, split))
            return method(self, *args, **options)

    return followed


def _telling_loss(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `training_step` so that its callbacks of this module get what it returns."""

    @wraps(method)
    def training_step(self: Any, *args: Any, **options: Any) -> Any:
        loss = method(self, *args, **options)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, Callback):
                callback.add_loss(loss)
        return loss

    return training_step


for _method, _split in _METHODS:
    setattr(Trainer, _method.__name__, _followed(_method, _split))
Trainer.training_step = _telling_loss(Trainer.training_step)  # type: ignore[method-assign]
