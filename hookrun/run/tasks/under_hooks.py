"""The base classes of tasks that run the experiment's model under its hooks; they share the preparation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import field_validator

from hookrun.data.info import ALL, SPLITS
from hookrun.engine.spec import HookSpec
from hookrun.engine.trust import read_once
from hookrun.errors import Problem, nearest
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.experiment.settings import Settings
from hookrun.run.experiment.task import JobCache, Task, changed, max_rows_of, metrics_of, stopping
from hookrun.store.objective import asked

if TYPE_CHECKING:
    from torch.nn import Module

    from hookrun.data import DataInfo, Split
    from hookrun.engine.plan.plan import ResolvedPlan
    from hookrun.engine.prove.trial import Example, Plan
    from hookrun.run.experiment.metrics.fit import Fit, SeenOutput
    from hookrun.run.experiment.prepare import Parts, Prepared
    from hookrun.run.passes.context import RunContext
    from hookrun.store.run_dir import RunDir


Sizes = Mapping["Split", int | None]
"""Split -> its number of samples; None if it is not known before the data is read."""


class TaskUnderHooks(Task):
    """Base of the tasks that run the model under its hooks.

    loggers:     where metrics are also logged: tensorboard, wandb, mlflow
    tensorboard: true adds the logger tensorboard

    scores:       without `task.metrics` it computes the loss, and the accuracy of labels
    not_compiled: why it cannot run a compiled model; empty if it can
    takes_apart:  it takes the rows of batches apart, so that samples have to be stacked
    """

    has_plan: ClassVar[bool] = True
    scores: ClassVar[bool] = False
    not_compiled: ClassVar[str] = ""
    takes_apart: ClassVar[bool] = False

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
        passes = [samples_of_a_pass(settings, sizes[split]) for split in self.splits]
        may_end_earlier = self.trains and settings.train.steps is not None
        if None in passes or may_end_earlier:
            return None
        return sum(filter(None, passes)) * (settings.train.epochs if self.trains else 1)

    def scores_with_loss(self, settings: Settings) -> bool:
        """Whether the task needs a loss: it trains, or the loss is asked for."""
        starts_from_it = (scored := self.scored()) is not None and scored[1].score == "loss"
        by_default = self.scores and metrics_of(self) is None and settings.train.loss is not None
        return self.trains or starts_from_it or by_default or asked(metrics_of(self), "loss")

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
        from hookrun.run.experiment.prepare import as_call

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
    def perform(self, context: RunContext) -> None:
        """Run the task; the hooks are installed."""

    def plan_problems(self, plan: ResolvedPlan, settings: Settings) -> Iterable[Problem]:
        """Problems of the plan for this task: with `compute.compile`, the hooks that cannot be compiled."""
        from hookrun.engine.plan.plan import uncompilable

        return uncompilable(plan) if settings.compute.compile else []

    def prepare(
        self, experiment: Experiment, *, trust: frozenset[str], cache: JobCache | None = None
    ) -> Prepared:
        """Build the model, compile the hooks for it and check them by a trial run; the data is not read.

        Raises SpecError, or CompileError where only hooks do not fit the model, with every mistake.
        """
        from hookrun.engine.prove.trial import compile_plan
        from hookrun.run.experiment.metrics.fit import SeenOutput
        from hookrun.run.experiment.metrics.problems import over_split_problems
        from hookrun.run.experiment.prepare import build, compiled, own_code, trained_parameters
        from hookrun.run.experiment.run_values import RunValues, differences, other_runs
        from hookrun.run.passes.backward_pass import Scoring

        parts = build(experiment, self.splits[0], trust, cache=cache)
        experiment, settings = parts.experiment, parts.experiment.settings
        runs = RunValues.of(experiment, self.splits[0])
        info, model, loss, hooks, plan = parts.data, parts.model, parts.loss, experiment.hooks, None
        parts.add(self.problems(settings, info))
        if info is not None and parts.metrics is not None:
            splits: Sequence[Split] = ("val",) if self.trains else self.splits
            passed = {split: samples_of_a_pass(settings, info.sizes[split]) for split in splits}
            most = max_rows_of(self)
            parts.tried(parts.add, over_split_problems(parts.metrics, passed, most, settings, info))
        if (stop := stopping(experiment)) is not None and (needs := self.needs_output()) is not None:
            parts.note(
                f"{stop.where}.action",
                f"stops the forward, and {needs} needs the model's output",
                f"use task=predict, without metrics and task.backward, or leave the hook out: ~{stop.where}",
            )
            parts.refuse()  # the trial run, which has no output, would report more
        trained = trained_parameters(parts) if self.trains else None
        notes, fit = self._idle_hooks(parts), None
        if info is not None and model is not None:
            parts.tried(lambda: parts.add(self.model_problems(experiment, info, model)))
            scored = self.scored()
            score = None if loss is None or scored is None else Scoring(scored[1], scored[0], loss)
            seen = SeenOutput(parts.device or "cpu", self.trains or scored is not None)
            plan = parts.tried(
                compiled,
                parts,
                info,
                model,
                self.only_split(),
                example=partial(self.example, info, model),
                training=self.trains,
                score=score,
                seen=seen,
                cache=cache,
            )
            fit = self._fitted(parts, seen)
        elif model is not None and hooks.hooks:
            parts.unchecked.append("shapes were not checked, because the data is not valid")
            parts.tried(compile_plan, hooks, model, values=runs)
        elif hooks.hooks:
            parts.unchecked.append("the hooks were not checked, because the model is not valid")
        differing = None if plan is None else self._check_plan(plan, parts)
        parts.refuse()
        # A part that is missing has been refused.
        assert plan is not None and info is not None and loss is not None and parts.metrics is not None
        notes += self.remarks(settings, hooks.hooks)
        notes += differences(hooks, settings, runs)
        notes += differing or []
        plan = replace(
            plan,
            samples=self.samples_in_all(settings, info.sizes),
            code=own_code(self, settings, loss, parts.metrics),
            runs=(*plan.runs, *other_runs(experiment)),
        )
        about = () if fit is None else fit.lines
        notes += () if fit is None else fit.notes
        prepared = parts.prepared(plan, (*experiment.notes, *notes), trained=trained)
        return replace(prepared, lines=(*data_lines(info, model), *about, *self.lines(prepared)))

    def _fitted(self, parts: Parts, seen: SeenOutput) -> Fit | None:
        """Check loss and metrics with the output of the trial run, and choose the default metrics."""
        from hookrun.run.experiment.metrics.fit import Fit

        settings, info, loss = parts.experiment.settings, parts.data, parts.loss
        needed = self.scores_with_loss(settings)
        if info is None or loss is None or parts.metrics is None:
            return None
        if not needed and not self.scores and metrics_of(self) is None:
            parts.metrics = ()
            return None
        is_given = settings.train.loss is not None
        fit = Fit(seen, info, loss, parts.metrics, is_given, needed)
        fit.check()
        parts.add(fit.problems)
        parts.metrics = fit.metrics
        return fit

    def _idle_hooks(self, parts: Parts) -> list[str]:
        """A note on each hook that never fires in this task; under `strict` it is a mistake instead."""
        notes = list[str]()
        for hook in parts.experiment.hooks.hooks:
            if not hook.keys.enabled or (idle := self.idle(hook)) is None:
                continue
            why, hint = idle
            if parts.experiment.settings.strict:
                parts.add([Problem(f"{hook.where}.hook", f"{hook.hook_type} {why}", hint)])
            else:
                notes.append(f"{hook.name}: {hook.hook_type} {why}: it will never fire; {hint}")
        return notes

    def _check_plan(self, plan: Plan, parts: Parts) -> list[str] | None:
        """Check that weights, samples, task and ranks have what the plan needs; returns notes on how ranks differ."""
        from hookrun.run.experiment.prepare import leftover_problems, missing_spans, row_problems
        from hookrun.run.experiment.rank_fit import check_ranks

        settings, info, model, loss = parts.experiment.settings, parts.data, parts.model, parts.loss
        assert info is not None and model is not None  # else there is no plan
        reach = self.samples_in_reach(settings, info.sizes)
        if parts.leftover:
            parts.add(leftover_problems(plan, parts.leftover))
        parts.add(row_problems(plan, reach, trains=self.trains), of_hooks=True)
        clauses = [
            (hook.keys.tokens, hook.where)
            for hook in parts.experiment.hooks.hooks
            # a hook with a schedule may not see the samples
            if hook.keys.enabled and hook.keys.when.always and self.idle(hook) is None
        ]
        clauses.append((getattr(self, "tokens", None), "task"))
        cut_short = self.trains and (settings.train.steps or settings.train.limit_batches) is not None
        missing = missing_spans(clauses, settings, self.splits[0], None if cut_short else reach)
        parts.tried(parts.add, missing, of_hooks=True)
        parts.add(self.plan_problems(plan, settings), of_hooks=True)
        if settings.compute.strategy == "none" or loss is None:
            return None
        return parts.tried(check_ranks, plan, model, loss, settings, trains=self.trains)

    def lines(self, prepared: Prepared) -> Iterable[str]:
        """Lines about the task that are shown with the plan."""
        trained = prepared.trained
        return trained.lines(prepared.settings.train.optimizer) if trained is not None else ()

    def remarks(self, settings: Settings, hooks: tuple[HookSpec, ...]) -> Iterable[str]:
        """Notes on what a user may not expect of these settings."""
        from hookrun.run.experiment.optimizers import SCHEDULER, schedule_notes

        schedule = settings.train.scheduler if self.trains else None
        return schedule_notes(schedule, SCHEDULER) if schedule is not None else ()

    def show(self, prepared: Prepared) -> None:
        """Print the whole plan, with lines and notes."""
        from hookrun.run.execute import show_plan
        from hookrun.run.passes.progress import Screen

        show_plan(prepared, Screen())

    def execute(self, prepared: Prepared, run_dir: RunDir) -> str | None:
        """Run the task under the hooks; returns why a check stopped it, or None."""
        from hookrun.run.execute import run_under_hooks

        names = [*self.loggers, *(["tensorboard"] if self.tensorboard else [])]
        with read_once(prepared.trust):
            return run_under_hooks(prepared, run_dir, self.perform, loggers=names)

    def problems(self, settings: Settings, info: DataInfo | None) -> Iterator[Problem]:
        """Problems of the settings; info: None if the data is invalid."""
        from hookrun.run.experiment.metrics.losses import ACTIVATION, OF_LABELS
        from hookrun.run.experiment.metrics.problems import metric_problems, score_problems
        from hookrun.run.experiment.optimizers import check_optimizer, check_scheduler
        from hookrun.run.passes.loggers import not_installed

        train = settings.train
        if settings.compute.strategy != "none":
            from hookrun.run.experiment.rank_fit import settings_misfits

            yield from settings_misfits(settings, scores=self.scores_with_loss(settings))
        if self.trains:
            yield from check_optimizer(train.optimizer)
            yield from check_scheduler(train.scheduler) if train.scheduler is not None else ()
        yield from metric_problems(self, settings, info)
        if (scored := self.scored()) is not None:
            yield from score_problems(*scored, info)
        loss = "" if train.loss is None else train.loss.name
        is_number = info and info.target and info.target.dtype.is_floating_point and not info.target.shape
        if is_number and loss in OF_LABELS and self.scores_with_loss(settings):
            yield Problem(
                "data.args.target" if "target" in settings.data.args else "train.loss",
                f"{loss!r} needs integer labels, and the data has one floating-point number a sample",
                "write labels as integers, or set train.loss=mse",
            )
        if settings.data.unstacked and (by := self._taking_apart(settings, info)):
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
        yield from not_installed("task.loggers", self.loggers)
        yield from not_installed("task.tensorboard", ["tensorboard"] if self.tensorboard else [])

    def _taking_apart(self, settings: Settings, info: DataInfo | None) -> str:
        """What takes batches apart into the rows of samples, in this task and these settings; empty: nothing."""
        if self.takes_apart:
            return f"task={self.name}"
        if (strategy := settings.compute.strategy) != "none":
            return f"compute.strategy={strategy}"
        by_sample = settings.data.batch_size is not None and info is not None and info.has_target_of_sample
        return "" if by_sample or self.scored() is None else "task.backward"


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


def data_lines(info: DataInfo, model: Module | None) -> Iterator[str]:
    """Lines for the plan: how the model is called if samples are not stacked, and what the data's files show."""
    from hookrun.engine.values.containers import arguments, describe
    from hookrun.run.experiment.prepare import EXAMPLE_BATCH, as_call

    if info.collated is not None and model is not None:
        inputs, targets = info.example_of(EXAMPLE_BATCH)
        call = describe(arguments(*as_call(inputs, model)))
        yield f"a batch, for example: the model's arguments {call}, targets {describe(targets)}"
    yield from info.remarks()


def samples_of_a_pass(settings: Settings, size: int | None) -> int | None:
    """How many of a split's `size` samples a pass uses under `train.limit_batches`; None: not known."""
    limit = settings.train.limit_batches
    if limit is None or size is None:
        return size
    return min(size, limit * settings.data.samples_of_batch)
