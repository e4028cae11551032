"""The base classes of tasks that run the experiment's model under its hooks; they share the preparation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import field_validator

from hookrun.data.info import ALL, SPLITS
from hookrun.errors import Problem, nearest
from hookrun.spec import Experiment, HookSpec, Settings
from hookrun.spec.metric import asked
from hookrun.tasks.base import JobCache, Task, changed, metrics_of
from hookrun.trust.packages import read_once

if TYPE_CHECKING:
    from torch.nn import Module

    from hookrun.data import DataInfo, Split
    from hookrun.plan.plan import ResolvedPlan
    from hookrun.prove.trial import Example, Plan
    from hookrun.store.run_dir import RunDir
    from hookrun.tasks.metrics.losses import TrainLoss
    from hookrun.tasks.run.backward_pass import Score
    from hookrun.tasks.run.components import Components, Mistakes
    from hookrun.tasks.run.context import RunContext
    from hookrun.tasks.run.prepare import Prepared
    from hookrun.tasks.training.parameter_groups import Trained


Sizes = Mapping["Split", int | None]
"""Split -> its number of samples; None if it is not known before the data is read."""


class TaskUnderHooks(Task):
    """Base of the tasks that run the model under its hooks.

    loggers:     where metrics are also logged: tensorboard, wandb, mlflow
    tensorboard: true adds the logger tensorboard

    scores:      the task computes `train.loss`, which may need targets
    """

    has_plan: ClassVar[bool] = True
    scores: ClassVar[bool] = False

    loggers: tuple[str, ...] = ()
    tensorboard: bool = False

    @field_validator("loggers")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        from hookrun.tasks.loggers import loggers

        for name in names:
            if name not in loggers():
                raise ValueError(f"found {name!r}, which is not a logger: {nearest(name, loggers())}")
        return names

    @abstractmethod
    def first_split(self) -> Split:
        """The split whose samples the hooks see first."""

    @abstractmethod
    def samples_in_reach(self, settings: Settings, sizes: Sizes) -> int | None:
        """The hooks see samples of `first_split` with ids below this; None: not known beforehand."""

    @abstractmethod
    def samples_in_all(self, settings: Settings, sizes: Sizes) -> int | None:
        """How many samples a run passes through the model in total; None: not known beforehand."""

    def scores_with_loss(self) -> bool:
        """Whether the task computes `train.loss`, which may need targets."""
        return self.scores

    def score(self, loss: TrainLoss) -> Score | None:
        """The score from which a backward pass without training starts; None: there is no such pass."""
        return None

    def idle(self, hook: HookSpec) -> tuple[str, str] | None:
        """(why the hook never fires in this task, what to do); None if it fires."""
        if self.trains or not hook.hook_type.needs_backward:
            return None
        return (
            f"needs a backward pass, which task={self.name} does not run",
            "use task=train, or leave the hook out",
        )

    def example(self, info: DataInfo, model: Module) -> Example:
        """The arguments of a model call with an example of the data, for the trial run of the hooks."""
        from hookrun.tasks.run.components import EXAMPLE_BATCH, as_call

        return as_call(info.example(EXAMPLE_BATCH), model)

    def model_problems(self, settings: Settings, info: DataInfo, model: Module) -> list[Problem]:
        """Problems of the model for this task."""
        return []

    @abstractmethod
    def perform(self, context: RunContext) -> None:
        """Run the task; the hooks are installed."""

    def plan_problems(self, plan: ResolvedPlan, settings: Settings) -> list[Problem]:
        """Problems of the plan for this task: with `compute.compile`, the hooks that cannot be compiled."""
        from hookrun.plan.graph_support import uncompilable

        return uncompilable(plan) if settings.compute.compile else []

    def prepare(
        self, experiment: Experiment, *, trust: frozenset[str], cache: JobCache | None = None
    ) -> Prepared:
        """Build the model, compile the hooks for it and check them by a trial run; the data is not read.

        Raises SpecError, or CompileError where only hooks do not fit the model, with every mistake.
        """
        from hookrun.run_values import RunReferences, differences, with_found_weights
        from hookrun.tasks.run.components import Mistakes, components
        from hookrun.tasks.run.prepare import check_leftover, check_selectors, compiled, whole

        mistakes, split, hooks = Mistakes(), self.first_split(), experiment.hooks
        experiment = mistakes.collected(lambda: with_found_weights(experiment)) or experiment
        settings = experiment.settings
        parts = components(settings, split, trust, mistakes, cache)
        info, model, loss = parts.data, parts.model, parts.loss
        mistakes.add(self.problems(settings, info))
        trained = self._trained(experiment, model, mistakes)
        notes = self._idle_hooks(experiment, mistakes)
        plan, differing = None, list[str]()
        if info is None or model is None:
            check_selectors(hooks, model, RunReferences.of(experiment, split), mistakes)
        else:
            mistakes.add(self._compared(experiment, info))
            mistakes.add(self.model_problems(settings, info, model))
            plan = mistakes.collected(
                lambda: compiled(
                    experiment,
                    model,
                    info,
                    self.only_split(),
                    example=self.example(info, model),
                    training=self.trains,
                    score=None if loss is None else self.score(loss),
                    cache=cache,
                )
            )
        if plan is not None and info is not None:
            plan = replace(plan, samples=self.samples_in_all(settings, info.sizes))
            mistakes.collected(partial(check_leftover, plan, parts.leftover))
            differing = self._check_plan(plan, experiment, parts, mistakes)
        mistakes.refuse()
        notes += [
            *self.remarks(settings, hooks.hooks),
            *differences(hooks, settings, RunReferences.of(experiment)),
        ]
        prepared = whole(parts, experiment, plan, [*notes, *differing], trains=self.trains)
        return replace(prepared, trained=trained, lines=tuple(self.lines(settings, trained)))

    def _trained(self, experiment: Experiment, model: Module | None, mistakes: Mistakes) -> Trained | None:
        """The parameters that the task trains, with all others frozen; None if it does not train, or cannot."""
        from hookrun.plan.model_tree import unhookable
        from hookrun.tasks.training.optimizers import OPTIMIZER, SCHEDULER, check_arguments
        from hookrun.tasks.training.parameter_groups import chosen

        # Compiling the hooks reports an unhookable model.
        if not self.trains or model is None or unhookable(model) is not None:
            return None
        train = experiment.settings.train
        trained, problems = chosen(train, experiment.hooks, model)
        misnamed = any(problem.where.startswith((OPTIMIZER, SCHEDULER)) for problem in mistakes.problems)
        if not problems and not misnamed:
            problems = check_arguments(train, model, trained.groups)
        mistakes.add(problems)
        if not mistakes.problems:
            trained.freeze_rest(model)
        return trained

    def _idle_hooks(self, experiment: Experiment, mistakes: Mistakes) -> list[str]:
        """A note on each hook that never fires in this task; under `strict` it is a mistake instead."""
        enabled = [hook for hook in experiment.hooks.hooks if hook.keys.enabled]
        idle = [(hook, *why) for hook in enabled if (why := self.idle(hook)) is not None]
        if experiment.settings.strict:
            mistakes.add(
                Problem(f"{hook.where}.hook", f"{hook.hook_type} {why}", hint) for hook, why, hint in idle
            )
            return []
        return [
            f"{hook.name}: {hook.hook_type} {why}: it will never fire; {hint}" for hook, why, hint in idle
        ]

    def _compared(self, experiment: Experiment, info: DataInfo) -> list[Problem]:
        """Problems of the runs with which the task's metrics compare."""
        from hookrun.tasks.metrics.problems import compared_problems

        if all(metric.against is None for metric in metrics_of(self) or ()):
            return []
        reach, only = self.samples_in_reach(experiment.settings, info.sizes), self.only_split()
        seen = (
            [only] if only is not None and not self.trains else [each for each in SPLITS if info.sizes[each]]
        )
        known = {split: reach if split == only and not self.trains else None for split in seen}
        return compared_problems(experiment, known, info)

    def _check_plan(
        self, plan: Plan, experiment: Experiment, parts: Components, mistakes: Mistakes
    ) -> list[str]:
        """Check that samples, task and ranks have what the plan needs; returns notes on how ranks differ."""
        from hookrun.tasks.run.prepare import check_rows, check_spans

        settings, model, loss = experiment.settings, parts.model, parts.loss
        reach = None if parts.data is None else self.samples_in_reach(settings, parts.data.sizes)
        mistakes.collected(lambda: check_rows(plan, reach, trains=self.trains))
        met = [hook for hook in experiment.hooks.hooks if self.idle(hook) is None]
        cut_short = self.trains and (settings.train.steps or settings.train.limit_batches) is not None
        mistakes.collected(
            lambda: check_spans(met, settings, self.first_split(), None if cut_short else reach)
        )
        mistakes.add(self.plan_problems(plan, settings), of_hooks=True)
        if settings.compute.strategy == "none" or model is None or loss is None:
            return []
        from hookrun.tasks.sharded.rank_fit import check_ranks

        return mistakes.collected(lambda: check_ranks(plan, model, loss, settings, trains=self.trains)) or []

    def lines(self, settings: Settings, trained: Trained | None) -> list[str]:
        """Lines about the task that are shown with the plan."""
        return list(trained.lines(settings.train.optimizer)) if trained is not None else []

    def remarks(self, settings: Settings, hooks: tuple[HookSpec, ...]) -> list[str]:
        """Notes on what a user may not expect of these settings."""
        from hookrun.tasks.training.optimizers import SCHEDULER, schedule_notes

        schedule = settings.train.scheduler if self.trains else None
        return list(schedule_notes(schedule, SCHEDULER)) if schedule is not None else []

    def only_split(self) -> Split | None:
        """The split of all samples; None if the task uses several splits without training."""
        return self.first_split()

    def show(self, prepared: Prepared) -> None:
        """Print the whole plan, with lines and notes."""
        from hookrun.tasks.run.execute import show_plan
        from hookrun.tasks.run.progress import Screen

        show_plan(prepared, Screen())

    def execute(self, prepared: Prepared, run_dir: RunDir) -> str | None:
        """Run the task under the hooks; returns why a check stopped it, or None."""
        from hookrun.tasks.run.execute import run_under_hooks

        names = [*self.loggers, *(["tensorboard"] if self.tensorboard else [])]
        with read_once(prepared.trust):
            return run_under_hooks(prepared, run_dir, self.perform, loggers=names)

    def problems(self, settings: Settings, info: DataInfo | None) -> list[Problem]:
        """Problems of the settings; info: None if the data is invalid."""
        from hookrun.tasks.loggers import not_installed
        from hookrun.tasks.metrics.losses import NEED_TARGET
        from hookrun.tasks.metrics.metrics import LOSS
        from hookrun.tasks.metrics.problems import metric_problems
        from hookrun.tasks.training.optimizers import check_optimizer, check_scheduler

        train = settings.train
        problems = list[Problem]()
        if settings.compute.strategy != "none":
            from hookrun.tasks.sharded.rank_fit import settings_misfits

            problems += settings_misfits(settings, scores=self.scores_with_loss())
        if self.trains:
            problems += check_optimizer(train.optimizer)
            problems += check_scheduler(train.scheduler) if train.scheduler is not None else []
        problems += metric_problems(self, settings, info)
        scores = self.scores_with_loss() or asked(metrics_of(self), LOSS)
        if scores and info and info.target is None and train.loss.name in NEED_TARGET:
            text = f"{train.loss.name!r} needs targets, and the data {info.name!r} has none"
            hint = "use output, output_mean or output_sum, or name a target"
            problems.append(Problem("train.loss", text, hint))
        problems += not_installed(self.loggers)
        if self.tensorboard and find_spec("tensorboard") is None:
            hint = "pip install 'hookrun[tensorboard]'"
            problems.append(Problem("task.tensorboard", "tensorboard is not installed", hint))
        return problems


class TaskOfOneSplit(TaskUnderHooks):
    """Base of the tasks that pass one split through the model in order, in evaluation mode.

    split: the split
    """

    split: Literal["train", "val"] = "val"

    def unused(self, experiment: Experiment) -> list[str]:
        """The section `train` without `limit_batches`, `log_every` and, if it is computed, the loss."""
        wants_loss = self.scores_with_loss() or asked(metrics_of(self), "loss")
        used = {"limit_batches", "log_every", *(["loss"] if wants_loss else [])}
        return changed("train", experiment.settings.train, but=used)

    def first_split(self) -> Split:
        """The task's split."""
        return self.split

    def samples_in_reach(self, settings: Settings, sizes: Sizes) -> int | None:
        """The samples of one pass."""
        return samples_of_a_pass(settings, sizes[self.split])

    def samples_in_all(self, settings: Settings, sizes: Sizes) -> int | None:
        """The samples of one pass."""
        return samples_of_a_pass(settings, sizes[self.split])


def data_of(settings: Settings, split: Split) -> DataInfo:
    """The description of the data, without reading it. Raises SpecError."""
    from hookrun import data

    return data.describe(settings.data, split)


class TaskOfSplits(TaskOfOneSplit):
    """Base of the tasks that may pass every split through the model, one after the other: `split: all`.

    Samples keep the ids of their split.
    """

    split: Literal["train", "val", "all"] = "val"  # type: ignore[assignment]

    @property
    def parts(self) -> tuple[Split, ...]:
        """The splits to pass through the model, in order."""
        return SPLITS if self.split == ALL else (SPLITS[SPLITS.index(self.split)],)

    def first_split(self) -> Split:
        """The first split."""
        return self.parts[0]

    def only_split(self) -> Split | None:
        """The split; None for all splits."""
        return self.parts[0] if len(self.parts) == 1 else None

    def samples_in_reach(self, settings: Settings, sizes: Sizes) -> int | None:
        """The samples of one pass; None for several splits, whose ids are independent."""
        return samples_of_a_pass(settings, sizes[self.parts[0]]) if len(self.parts) == 1 else None

    def samples_in_all(self, settings: Settings, sizes: Sizes) -> int | None:
        """The samples of one pass over each split."""
        passes = [samples_of_a_pass(settings, sizes[part]) for part in self.parts]
        return None if None in passes else sum(filter(None, passes))


def samples_of_a_pass(settings: Settings, size: int | None) -> int | None:
    """How many of a split's `size` samples a pass uses under `train.limit_batches`; None: not known."""
    limit = settings.train.limit_batches
    if limit is None or size is None:
        return size
    return min(size, limit * settings.data.batch_size)
