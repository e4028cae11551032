"""The base classes of tasks that run the experiment's model under its hooks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import field_validator

from hookrun.data.info import ALL, SPLITS
from hookrun.engine.trust import read_once
from hookrun.errors import Problem, nearest
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.experiment.model_task import ModelTask
from hookrun.run.experiment.settings import Settings
from hookrun.run.experiment.task import JobCache, changed, metrics_of

if TYPE_CHECKING:
    from hookrun.data import DataInfo, Split
    from hookrun.run.experiment.metrics.losses import TrainLoss
    from hookrun.run.experiment.prepared import Prepared, Score
    from hookrun.run.passes.context import RunContext
    from hookrun.store.run_dir import RunDir


class TaskUnderHooks(ModelTask):
    """Base of the tasks that run the model under its hooks.

    loggers:     where metrics are also logged: tensorboard, wandb, mlflow
    tensorboard: true adds the logger tensorboard
    """

    loggers: tuple[str, ...] = ()
    tensorboard: bool = False

    @field_validator("loggers")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        from hookrun.run.passes.loggers import loggers

        for name in names:
            if name not in loggers():
                raise ValueError(f"found {name!r}, which is not a logger: {nearest(name, loggers())}")
        return names

    @abstractmethod
    def perform(self, context: RunContext) -> None:
        """Run the task; the hooks are installed."""

    def prepare(
        self, experiment: Experiment, *, trust: frozenset[str], cache: JobCache | None = None
    ) -> Prepared:
        """Build the model, compile the hooks for it and check them by a trial run; the data is not read.

        Raises SpecError, or CompileError where only hooks do not fit the model, with every mistake.
        """
        from hookrun.run.experiment.prepare import prepare_under_hooks

        return prepare_under_hooks(self, experiment, trust=trust, cache=cache)

    def score_from(self, loss: TrainLoss) -> Score | None:
        """The score of `task.backward`, of the trial run's output."""
        from hookrun.run.passes.backward_pass import Scoring

        scored = self.scored()
        return None if scored is None else Scoring(scored[1], scored[0], loss)

    def problems(self, settings: Settings, info: DataInfo | None) -> Iterator[Problem]:
        """Problems of the settings; info: None if the data is invalid."""
        from hookrun.run.passes.loggers import not_installed

        yield from super().problems(settings, info)
        yield from not_installed("task.loggers", self.loggers)
        yield from not_installed("task.tensorboard", ["tensorboard"] if self.tensorboard else [])

    def show(self, prepared: Prepared) -> None:
        """Print the whole plan, with lines and notes."""
        from hookrun.run.passes.open_run import show_plan
        from hookrun.run.passes.progress import Screen

        show_plan(prepared, Screen())

    def as_data(self, prepared: Prepared) -> dict[str, Any]:
        """The plan, and the lines below it."""
        from hookrun.engine.plan.table import data, notes

        *lines, _ = notes(prepared.plan)  # the last one is the hash
        return {"plan": data(prepared.plan), "notes": [*prepared.lines, *lines]}

    def execute(self, prepared: Prepared, run_dir: RunDir) -> str | None:
        """Run the task under the hooks; returns why a check stopped it, or None."""
        from hookrun.run.passes.open_run import run_under_hooks

        names = [*self.loggers, *(["tensorboard"] if self.tensorboard else [])]
        with read_once(prepared.trust):
            return run_under_hooks(prepared, run_dir, self.perform, loggers=names)


class TaskOfOneSplit(TaskUnderHooks):
    """Base of the tasks that pass one split through the model in order, in evaluation mode.

    split: the split
    """

    split: Literal["train", "val"] = "val"

    def unused(self, experiment: Experiment) -> list[str]:
        """The section `train` without `limit_batches`, `log_every` and, if they are used, loss and output."""
        settings, used = experiment.settings, {"limit_batches", "log_every"}
        if self.scores_with_loss(settings):
            used.add("loss")
        if self.scores or metrics_of(self) is not None or self.scored() is not None:
            used.add("output")
        return changed("train", settings.train, but=used)

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits to pass through the model, in order."""
        return SPLITS if self.split == ALL else (SPLITS[SPLITS.index(self.split)],)


class TaskOfSplits(TaskOfOneSplit):
    """Base of the tasks that may pass every split through the model, one after the other: `split: all`.

    Samples keep the ids of their split.
    """

    split: Literal["train", "val", "all"] = "val"  # type: ignore[assignment]
