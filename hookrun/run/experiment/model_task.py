"""The base class of tasks that run the model under its hooks, as far as their preparation asks it. Imports no torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from hookrun.data.info import SPLITS
from hookrun.engine.spec import HookSpec
from hookrun.errors import Problem
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.experiment.settings import Settings
from hookrun.run.experiment.task import Task, metrics_of
from hookrun.store.objective import asked

if TYPE_CHECKING:
    from torch.nn import Module

    from hookrun.data import DataInfo, Split
    from hookrun.engine.plan.plan import ResolvedPlan
    from hookrun.engine.prove.trial import Example
    from hookrun.run.experiment.metrics.losses import TrainLoss
    from hookrun.run.experiment.prepared import Prepared, Score

Sizes = Mapping["Split", int | None]
"""Split -> its number of samples; None if it is not known before the data is read."""


class ModelTask(Task):
    """Base of the tasks that run the model under its hooks: what `prepare_under_hooks` asks a task.

    scores:       without `task.metrics` it computes the loss, and the accuracy of labels
    not_compiled: why it cannot run a compiled model; empty if it can
    takes_apart:  it takes the rows of batches apart, so that samples have to be stacked
    """

    has_plan: ClassVar[bool] = True
    scores: ClassVar[bool] = False
    not_compiled: ClassVar[str] = ""
    takes_apart: ClassVar[bool] = False

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits that the task passes through the model, in order."""
        return SPLITS

    def only_split(self) -> Split | None:
        """The split whose samples the hooks see first; None if the task passes several without training."""
        return self.splits[0] if self.trains or len(self.splits) == 1 else None

    def samples_in_reach(self, settings: Settings, sizes: Sizes) -> int | None:
        """The hooks see samples of the first split with ids below this; None: not known, or ids of several splits.

        A training sees all if they are shuffled, since `train.limit_batches` then uses others in each epoch.
        """
        size = sizes[self.splits[0]]
        if self.trains and settings.train.shuffle:
            return size
        return samples_of_a_pass(settings, size) if self.trains or len(self.splits) == 1 else None

    def samples_in_all(self, settings: Settings, sizes: Sizes) -> int | None:
        """How many samples all passes over the splits have in total; None: not known, as with `train.steps`."""
        if self.trains and settings.train.steps is not None:
            return None
        total = 0
        for split in self.splits:
            samples = samples_of_a_pass(settings, sizes[split])
            if samples is None:
                return None
            total += samples
        return total * settings.train.epochs if self.trains else total

    def scores_with_loss(self, settings: Settings) -> bool:
        """Whether the task needs a loss: it trains, or the loss is asked for."""
        metrics = metrics_of(self)
        scored = self.scored()
        if self.trains or asked(metrics, "loss"):
            return True
        if scored is not None and scored[1].score == "loss":
            return True
        return self.scores and metrics is None and settings.train.loss is not None

    def needs_output(self) -> str | None:
        """What needs the model's output, which a hook may stop; None if nothing does."""
        return f"task={self.name}"

    def idle(self, hook: HookSpec) -> tuple[str, str] | None:
        """(why the hook never fires in this task, what to do); None if it fires."""
        if self.trains or not hook.hook_type.needs_backward:
            return None
        return (
            f"needs a backward pass, which task={self.name} does not run",
            "use task=train, or leave the hook out",
        )

    def example(self, info: DataInfo, model: Module, samples: int) -> Example:
        """The arguments of a model call with so many samples of the data, for the trial run of the hooks."""
        from hookrun.run.experiment.prepared import as_call

        return as_call(info.example(samples), model)

    def model_problems(self, experiment: Experiment, info: DataInfo, model: Module) -> Iterable[Problem]:
        """Problems of the model for this task, and of the runs with which its metrics compare the model.

        A task may also raise SpecError or CompileError, whose mistakes are added.
        """
        from hookrun.run.experiment.metrics.problems import compared_problems, compared_runs

        if not compared_runs(experiment.settings):
            return ()
        # a training with a limit may pass others of its samples in each epoch
        passed: Sizes = {
            split: None if self.trains else samples_of_a_pass(experiment.settings, info.sizes[split])
            for split in self.splits
            if info.sizes[split] or len(self.splits) == 1
        }
        return compared_problems(experiment, passed, info)

    @abstractmethod
    def score_from(self, loss: TrainLoss) -> Score | None:
        """The score from which a backward pass without training starts; None: there is none."""

    def plan_problems(self, plan: ResolvedPlan, settings: Settings) -> Iterable[Problem]:
        """Problems of the plan for this task: with `compute.compile`, the hooks that cannot be compiled."""
        from hookrun.engine.plan.plan import uncompilable

        return uncompilable(plan) if settings.compute.compile else []

    def lines(self, prepared: Prepared) -> Iterable[str]:
        """Lines about the task that are shown with the plan."""
        trained = prepared.trained
        return trained.lines(prepared.settings.train.optimizer) if trained is not None else ()

    def remarks(self, settings: Settings, hooks: tuple[HookSpec, ...]) -> Iterable[str]:
        """Notes on what a user may not expect of these settings."""
        from hookrun.run.experiment.optimizers import SCHEDULER, schedule_notes

        schedule = settings.train.scheduler if self.trains else None
        return schedule_notes(schedule, SCHEDULER) if schedule is not None else ()

    def problems(self, settings: Settings, info: DataInfo | None) -> Iterator[Problem]:
        """Problems of the settings; info: None if the data is invalid."""
        from hookrun.run.experiment.metrics.losses import ACTIVATION, OF_LABELS
        from hookrun.run.experiment.metrics.problems import metric_problems, score_problems
        from hookrun.run.experiment.optimizers import check_optimizer, check_scheduler

        train = settings.train
        if settings.compute.strategy != "none":
            from hookrun.run.experiment.rank_fit import settings_misfits

            yield from settings_misfits(settings, scores=self.scores_with_loss(settings))
        if self.trains:
            yield from check_optimizer(train.optimizer)
            if train.scheduler is not None:
                yield from check_scheduler(train.scheduler)
        yield from metric_problems(self, settings, info)
        scored = self.scored()
        if scored is not None:
            yield from score_problems(*scored, info)
        loss = "" if train.loss is None else train.loss.name
        target = None if info is None else info.target
        is_number = target is not None and target.dtype.is_floating_point and not target.shape
        if is_number and loss in OF_LABELS and self.scores_with_loss(settings):
            yield Problem(
                "data.args.target" if "target" in settings.data.args else "train.loss",
                f"{loss!r} needs integer labels, and the data has one floating-point number a sample",
                "write labels as integers, or set train.loss=mse",
            )
        by = self._taking_apart(settings, info)
        if settings.data.unstacked and by:
            what = f"{by} needs a row for each sample, and these batches are not stacked"
            yield Problem(settings.data.unstacked, what, "leave one of them out")
        if settings.compute.compile and loss == ACTIVATION:
            yield Problem(
                "train.loss",
                "'activation' reads the output of a module, which a compiled model does not have",
                "set compute.compile=false",
            )
        if settings.compute.compile and self.not_compiled:
            yield Problem("compute.compile", self.not_compiled, "set it to false")

    def _taking_apart(self, settings: Settings, info: DataInfo | None) -> str:
        """What takes batches apart into the rows of samples, in this task and these settings; empty: nothing."""
        if self.takes_apart:
            return f"task={self.name}"
        if (strategy := settings.compute.strategy) != "none":
            return f"compute.strategy={strategy}"
        by_sample = settings.data.batch_size is not None and info is not None and info.has_target_of_sample
        return "" if by_sample or self.scored() is None else "task.backward"


def samples_of_a_pass(settings: Settings, size: int | None) -> int | None:
    """How many of a split's `size` samples a pass uses under `train.limit_batches`; None: not known."""
    limit = settings.train.limit_batches
    if limit is None or size is None:
        return size
    return min(size, limit * settings.data.samples_of_batch)
