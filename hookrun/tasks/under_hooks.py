"""Tasks that run the experiment's model under its hooks: they prepare alike, and differ in what they then perform."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import field_validator

from hookrun.errors import CompileError, Problem, SpecError, nearest
from hookrun.spec import Experiment, Settings
from hookrun.tasks.base import Task

if TYPE_CHECKING:
    from hookrun.data import DataInfo, Split
    from hookrun.plan.plan import ResolvedPlan
    from hookrun.store.run_dir import RunDir
    from hookrun.tasks.loop.prepared import Prepared
    from hookrun.tasks.loop.running import Running

Sizes = Mapping["Split", int | None]
"""How many samples each split has; None where only reading the data would tell."""


class TaskUnderHooks(Task):
    """Base of the tasks that run the model under its hooks.

    loggers:     where metrics go as well: tensorboard, wandb, mlflow
    tensorboard: the same as that logger

    trains:      it trains the model: hooks are proven in training mode, optimizer and schedule are checked
    scores:      it computes `train.loss`, which may need targets
    """

    has_plan: ClassVar[bool] = True
    trains: ClassVar[bool] = False
    scores: ClassVar[bool] = False

    loggers: tuple[str, ...] = ()
    tensorboard: bool = False

    @field_validator("loggers")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        from hookrun.tasks.loop.loggers import loggers

        for name in names:
            if name not in loggers():
                raise ValueError(f"found {name!r}, which is not a logger: {nearest(name, loggers())}")
        return names

    @abstractmethod
    def split_seen(self) -> Split:
        """The split whose samples the hooks meet first."""

    @abstractmethod
    def samples_in_reach(self, settings: Settings, sizes: Sizes) -> int | None:
        """The hooks meet samples of `split_seen` with ids below this; None where it is not known beforehand."""

    @abstractmethod
    def samples_in_all(self, settings: Settings, sizes: Sizes) -> int | None:
        """How many samples a run passes through the hooks; None where it is not known beforehand."""

    @abstractmethod
    def perform(self, running: Running) -> None:
        """Do the task; the hooks are installed."""

    def misfits(self, plan: ResolvedPlan, settings: Settings) -> list[Problem]:
        """The hooks that cannot go into a graph, where the run needs one."""
        from hookrun.plan.graph_support import uncompilable

        return uncompilable(plan) if settings.compute.compile else []

    def prepare(self, experiment: Experiment, *, trust: frozenset[str]) -> Prepared:
        """Build the model, and compile and prove the hooks against it; the data is not read.

        Raises SpecError and CompileError.
        """
        from hookrun.tasks.loop.optimizers import check_arguments
        from hookrun.tasks.loop.prepared import build, check_leftover, check_rows, compiled

        settings, split = experiment.settings, self.split_seen()
        built = build(settings, split, trust, lambda info: self._problems(settings, info))
        if self.trains and (refused := check_arguments(settings.train, built.model)):
            raise SpecError(refused)
        hooks, notes = experiment.hooks, self._idle_hooks(experiment)
        prepared = compiled(experiment, hooks, built, split, training=self.trains, notes=notes)
        plan, sizes = prepared.plan, built.data.sizes
        check_leftover(prepared)
        check_rows(plan, self.samples_in_reach(settings, sizes), trains=self.trains)
        if misfits := self.misfits(plan, settings):
            raise CompileError(misfits)
        return replace(prepared, plan=replace(plan, samples=self.samples_in_all(settings, sizes)))

    def _idle_hooks(self, experiment: Experiment) -> list[str]:
        """A note on each hook that the task never runs, for want of a backward pass; SpecError under `strict`."""
        if self.trains:
            return []
        idle = [
            hook for hook in experiment.hooks.hooks if hook.keys.enabled and hook.hook_type.needs_backward
        ]
        what = f"needs a backward pass, which task={self.name} does not run"
        if idle and experiment.settings.strict:
            hint = "use task=train, or leave the hook out"
            raise SpecError(
                [Problem(f"{hook.where}.hook", f"{hook.hook_type} {what}", hint) for hook in idle]
            )
        return [f"{hook.name}: {hook.hook_type} {what}: it will never fire" for hook in idle]

    def show(self, prepared: Prepared) -> None:
        """Print the whole plan, and what to know beside it."""
        from hookrun.tasks.loop.progress import Screen
        from hookrun.tasks.loop.under_hooks import show_plan

        show_plan(prepared, Screen())

    def execute(self, prepared: Prepared, run_dir: RunDir) -> str | None:
        """Perform the task under the hooks; returns why a check stopped it, or None."""
        from hookrun.tasks.loop.under_hooks import run_under_hooks

        return run_under_hooks(
            prepared,
            run_dir,
            self.perform,
            loggers=[*self.loggers, *(["tensorboard"] if self.tensorboard else [])],
        )

    def _problems(self, settings: Settings, info: DataInfo | None) -> list[Problem]:
        """What is wrong with the settings; info: None where the data itself is wrong."""
        from hookrun.tasks.loop.loggers import not_installed
        from hookrun.tasks.loop.losses import NEED_TARGET
        from hookrun.tasks.loop.optimizers import check_optimizer, check_scheduler

        train = settings.train
        problems = list[Problem]()
        if self.trains:
            problems += check_optimizer(train.optimizer)
            problems += check_scheduler(train.scheduler) if train.scheduler is not None else []
        if self.scores and info and info.target is None and train.loss in NEED_TARGET:
            text = f"{train.loss!r} needs targets, and the data {info.name!r} has none"
            hint = "use output, output_mean or output_sum, or name a target"
            problems.append(Problem("train.loss", text, hint))
        problems += not_installed(self.loggers)
        if self.tensorboard and find_spec("tensorboard") is None:
            hint = "pip install 'hookrun[tensorboard]'"
            problems.append(Problem("task.tensorboard", "tensorboard is not installed", hint))
        return problems


class TaskOfOneSplit(TaskUnderHooks):
    """Base of the tasks that pass one split through the model in order, in evaluation mode.

    split: which one
    """

    split: Literal["train", "val"] = "val"

    def split_seen(self) -> Split:
        """The split itself."""
        return self.split

    def samples_in_reach(self, settings: Settings, sizes: Sizes) -> int | None:
        """The samples of one pass."""
        return samples_of_a_pass(settings, sizes[self.split])

    def samples_in_all(self, settings: Settings, sizes: Sizes) -> int | None:
        """The samples of one pass."""
        return samples_of_a_pass(settings, sizes[self.split])


def samples_of_a_pass(settings: Settings, size: int | None) -> int | None:
    """How many samples `train.limit_batches` leaves of a split of `size` samples; None where that is not known."""
    limit = settings.train.limit_batches
    if limit is None or size is None:
        return size
    return min(size, limit * settings.data.batch_size)
