"""The Lightning callback: hooks, clock, run directory and report follow the Trainer."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

from hookrun.integrations import needing

with needing("lightning", "lightning"):
    from lightning.pytorch import Callback as LightningCallback

from hookrun.integrations.recording import LoopFollower

_OF_A_LOADER = "/dataloader_idx_"


class Callback(LoopFollower, LightningCallback):
    """``Trainer(callbacks=[Callback(spec, run_dir="outputs/mine")])``: each fit, validate, test or predict is one run.

    The hooks are installed on the LightningModule, so that selectors are its names, before its optimizers are made.
    The step is the optimizer's and the epoch the Trainer's; in evaluation a step is a batch. Accumulation and the
    precision plugin's gradient scaler are followed; the sanity check is neither counted nor recorded. What is logged
    with `self.log` goes to metrics.jsonl when Lightning's own loggers would get it, and in the last batch of an epoch.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._evaluation = ExitStack()
        self._step = 0
        self._is_logged = True
        self._in_time: Collection[str] = ()
        self._late = dict[str, Any]()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_evaluation": ExitStack()}

    # ---- begin and end -----------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Install the hooks, before the optimizers are created, so that these get parameters that hooks add."""
        self._in_time = ()
        self._late = {}
        self.begin(pl_module, getattr(trainer.precision_plugin, "scaler", None), trains=stage == "fit")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End the run."""
        self.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the run with the exception."""
        self._evaluation.close()
        self.end(exception)

    # ---- training ----------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the epoch to the Trainer's."""
        self._log_late(trainer)
        self.epoch(trainer.current_epoch)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Set the step, and whether the optimizer steps after this batch."""
        hooks = self.following
        if hooks is None:
            return
        if pl_module.automatic_optimization:
            hooks.clock.place(trainer.global_step)
            follow = (batch_idx + 1) % trainer.accumulate_grad_batches != 0
            is_last = trainer.is_last_batch or batch_idx + 1 == trainer.num_training_batches
            hooks.accumulating = follow and not is_last
        self._step = hooks.clock.step
        self._is_logged = False
        self.batch(batch, "train")

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what Lightning logs at this step, then move on to the next."""
        hooks = self.following
        if hooks is None:
            return
        is_due = (self._step + 1) % (trainer.log_every_n_steps or 1) == 0
        if not hooks.accumulating and (is_due or trainer.is_last_batch):
            self._log_batch(trainer)
        if pl_module.automatic_optimization:
            self.add_loss((outputs or {}).get("loss"))
            hooks.clock.place(trainer.global_step)
        trainer.should_stop = trainer.should_stop or self.stops

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the last batch, if the epoch ended before its last one, and the epoch means."""
        self._log_batch(trainer)
        self._in_time = _logged(trainer).keys()
        self.write("train", _logged(trainer))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Log what the module logged at the end of the last epoch."""
        self._log_late(trainer)

    def _log_batch(self, trainer: Any) -> None:
        """Write what the module logged in the latest batch, if it has not been written yet."""
        if trainer.log_every_n_steps and not self._is_logged:
            self._is_logged = True
            self.write("train", trainer.fit_loop._results.metrics(on_step=True)["log"], self._step)

    def _log_late(self, trainer: Any) -> None:
        """Write what the module logged at the end of an epoch, which happens after the callbacks are called."""
        names = set[str]()
        for result in trainer.fit_loop._results.values():
            if result.meta.logger and result.meta.fx == "on_train_epoch_end":
                names.add(result.meta.name)
        names -= set(self._in_time)
        logged = {name: value for name, value in trainer.logged_metrics.items() if name in names}
        new = {name: value for name, value in logged.items() if self._late.get(name) is not value}
        self.write("train", new)
        self._late = logged

    # ---- evaluation --------------------------------------------------------------------------------------------

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Do not count or record the sanity check."""
        if self.following is not None:
            self._evaluation.enter_context(self.following.muted())

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        """Count and record again."""
        self._evaluation.close()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Count batches as steps."""
        self._evaluation.enter_context(self.evaluating())

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begin a batch."""
        self.batch(batch, None if trainer.testing or trainer.predicting else "val")

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """End a batch."""
        if trainer.validating or trainer.testing:
            self.write("test" if trainer.testing else "val", _logged(trainer))
        self.evaluated_batch()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """End the pass, and log the results of a validation at the step of the training."""
        if trainer.sanity_checking:
            return  # on_sanity_check_end closes
        self._evaluation.close()
        if not trainer.predicting:
            by_loader = {
                name: value for name, value in trainer.logged_metrics.items() if _OF_A_LOADER in name
            }
            self.write("test" if trainer.testing else "val", {**_logged(trainer), **by_loader})

    on_test_start = on_predict_start = on_validation_start
    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_end = on_predict_end = on_validation_end


def _logged(trainer: Any) -> dict[str, Any]:
    """What was logged for loggers since the batch or the epoch began."""
    # `trainer.logged_metrics` also contains earlier values, without telling them apart.
    return trainer._logger_connector.metrics["log"]
