"""Prepares an experiment whose model runs under hooks: builds what it names, proves its hooks, and checks both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from hookrun.data import DataInfo, Split
from hookrun.data.info import SPLITS
from hookrun.engine.keys import HOOKS_FROM
from hookrun.engine.plan.plan import SHOWN
from hookrun.engine.prove.trial import Plan, compile_plan
from hookrun.engine.spec import Spec
from hookrun.engine.values.containers import arguments, describe
from hookrun.errors import SpecError, listed
from hookrun.run.experiment.building import build, own_code, trained_parameters
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.experiment.metrics.fit import Fit, SeenOutput
from hookrun.run.experiment.metrics.problems import over_split_problems
from hookrun.run.experiment.model_task import ModelTask, samples_of_a_pass
from hookrun.run.experiment.prepared import EXAMPLE_BATCH, Parts, Prepared, as_call
from hookrun.run.experiment.proving import compiled
from hookrun.run.experiment.rank_fit import check_ranks, dropping
from hookrun.run.experiment.run_values import RunValues, differences, other_runs
from hookrun.run.experiment.sample_checks import (
    label_problems,
    leftover_problems,
    missing_spans,
    row_problems,
)
from hookrun.run.experiment.settings import Settings
from hookrun.run.experiment.task import JobCache, max_rows_of, metrics_of, stopping
from hookrun.store.bundles import read_bundle


def prepare_under_hooks(
    task: ModelTask, experiment: Experiment, *, trust: frozenset[str], cache: JobCache | None = None
) -> Prepared:
    """Build the model, compile the hooks for it and check them by a trial run; the data is not read.

    trust: names of the packages whose code the experiment may use
    cache: models and trial runs of the sweep's jobs that were checked before

    Raises SpecError, or CompileError where only hooks do not fit the model, with every mistake.
    """
    parts = build(experiment, task.splits[0], trust, cache=cache)
    experiment, settings = parts.experiment, parts.experiment.settings
    parts.tried(_require_bundle, settings)
    parts.add(task.problems(settings, parts.data))
    _check_metrics_over_a_split(task, parts)
    _refuse_a_stop_before_the_output(task, parts)
    trained = trained_parameters(parts) if task.trains else None
    notes = _idle_hooks(task, parts)
    plan: Plan | None = None
    fit: Fit | None = None
    if parts.data is None or parts.model is None:
        _resolve_unchecked(task, parts)
    else:
        plan, fit = _prove(task, parts, parts.data, parts.model, cache)
    differing = [] if plan is None else _check_plan(task, parts, plan)
    parts.refuse()
    info, loss, metrics = parts.data, parts.loss, parts.metrics
    # A part that is missing has been refused.
    assert plan is not None and info is not None and loss is not None and metrics is not None
    runs = RunValues.of(experiment, task.splits[0])
    notes += task.remarks(settings, experiment.hooks.hooks)
    if settings.compute.compile and task.trains and parts.model is not None:
        notes += _dropout_notes(parts.model)
    notes += differences(experiment.hooks, settings, runs)
    notes += differing
    lines = list(data_lines(info, parts.model))
    if fit is not None:
        notes += fit.notes
        lines += fit.lines
    plan = replace(
        plan,
        samples=task.samples_in_all(settings, info.sizes),
        code=own_code(task, settings, loss, metrics),
        runs=(*plan.runs, *other_runs(experiment)),
    )
    prepared = parts.prepared(plan, (*experiment.notes, *notes), trained=trained)
    return replace(prepared, lines=(*lines, *task.lines(prepared)))


def _require_bundle(settings: Settings) -> None:
    """Raise SpecError if the tensors of the bundle are not those that it was written with."""
    if settings.hooks_from is not None:
        read_bundle(settings.hooks_from, HOOKS_FROM, whole=True)


def data_lines(info: DataInfo, model: nn.Module | None) -> Iterator[str]:
    """Lines for the plan: how the model is called if samples are not stacked, and what the data's files show."""
    if info.collated is not None and model is not None:
        inputs, targets = info.example_of(EXAMPLE_BATCH)
        call = describe(arguments(*as_call(inputs, model)))
        yield f"a batch, for example: the model's arguments {call}, targets {describe(targets)}"
    yield from info.remarks()


def _check_metrics_over_a_split(task: ModelTask, parts: Parts) -> None:
    """Add the mistakes in metrics that need all rows of a split at once."""
    info, settings = parts.data, parts.experiment.settings
    if info is None or parts.metrics is None:
        return
    splits: Sequence[Split] = ("val",) if task.trains else task.splits
    passed = {split: samples_of_a_pass(settings, info.sizes[split]) for split in splits}
    problems = over_split_problems(parts.metrics, passed, max_rows_of(task), settings, info)
    parts.tried(parts.add, problems)


def _refuse_a_stop_before_the_output(task: ModelTask, parts: Parts) -> None:
    """Raise SpecError if a hook stops the forward before the output that the task needs."""
    stop = stopping(parts.experiment)
    needs = task.needs_output()
    if stop is None or needs is None:
        return
    parts.note(
        f"{stop.where}.action",
        f"stops the forward, and {needs} needs the model's output",
        f"use task=predict, without metrics and task.backward, or leave the hook out: ~{stop.where}",
    )
    parts.refuse()  # the trial run, which has no output, would report more


def _dropout_notes(model: nn.Module) -> Iterator[str]:
    """A note if the compiled model drops other elements in training than the model itself."""
    paths = dropping(model)
    if paths:
        yield (
            "compute.compile: dropout draws other numbers in a compiled graph, so training differs from that with "
            f"compute.compile=false, on {listed(paths, SHOWN)}"
        )


def _idle_hooks(task: ModelTask, parts: Parts) -> list[str]:
    """A note on each hook that never fires in this task; under `strict` it is a mistake instead."""
    notes: list[str] = []
    for hook in parts.experiment.hooks.hooks:
        idle = task.idle(hook) if hook.keys.enabled else None
        if idle is None:
            continue
        why, hint = idle
        if parts.experiment.settings.strict:
            parts.note(f"{hook.where}.hook", f"{hook.hook_type} {why}", hint)
        else:
            notes.append(f"{hook.name}: {hook.hook_type} {why}: it will never fire; {hint}")
    return notes


def _prove(
    task: ModelTask, parts: Parts, info: DataInfo, model: nn.Module, cache: JobCache | None
) -> tuple[Plan | None, Fit | None]:
    """The plan, proven by a trial run, and how loss and metrics fit its output; None where they are not valid."""
    parts.tried(lambda: parts.add(task.model_problems(parts.experiment, info, model)))
    score = None if parts.loss is None else task.score_from(parts.loss)
    seen = SeenOutput(parts.device or "cpu", task.trains or task.scored() is not None)
    plan = parts.tried(
        compiled,
        parts,
        info,
        model,
        task.only_split(),
        example=partial(task.example, info, model),
        training=task.trains,
        score=score,
        seen=seen,
        cache=cache,
    )
    return plan, _fitted(task, parts, info, seen)


def _fitted(task: ModelTask, parts: Parts, info: DataInfo, seen: SeenOutput) -> Fit | None:
    """Check loss and metrics with the output of the trial run, and choose the default metrics."""
    settings = parts.experiment.settings
    needed = task.scores_with_loss(settings)
    if parts.loss is None or parts.metrics is None:
        return None
    if not needed and not task.scores and metrics_of(task) is None:
        parts.metrics = ()
        return None
    fit = Fit(seen, info, parts.loss, parts.metrics, settings.train.loss is not None, needed)
    fit.check()
    parts.add(fit.problems)
    parts.metrics = fit.metrics
    return fit


def _resolve_unchecked(task: ModelTask, parts: Parts) -> None:
    """Add the mistakes that can be found in the hooks although the data or the model is not valid."""
    hooks = parts.experiment.hooks
    if not hooks.hooks:
        return
    if parts.model is None:
        parts.unchecked.append("the hooks were not checked, because the model is not valid")
        return
    parts.unchecked.append("shapes were not checked, because the data is not valid")
    runs = RunValues.of(parts.experiment, task.splits[0])
    parts.tried(compile_plan, hooks, parts.model, values=runs)


def _check_plan(task: ModelTask, parts: Parts, plan: Plan) -> list[str]:
    """Check that weights, samples, task and ranks have what the plan needs; returns notes on how ranks differ."""
    settings, info, model, loss = parts.experiment.settings, parts.data, parts.model, parts.loss
    assert info is not None and model is not None  # else there is no plan
    limit = task.samples_in_reach(settings, info.sizes)
    if parts.leftover:
        parts.add(leftover_problems(plan, parts.leftover))
    parts.add(row_problems(plan, limit, trains=task.trains), of_hooks=True)
    parts.add(label_problems(plan, info), of_hooks=True)
    clauses = [(getattr(task, "tokens", None), "task")]
    for hook in parts.experiment.hooks.hooks:
        # a hook with a schedule may not see the samples
        if hook.keys.enabled and hook.keys.when.always and task.idle(hook) is None:
            clauses.append((hook.keys.tokens, hook.where))
    is_cut_short = task.trains and (settings.train.steps or settings.train.limit_batches) is not None
    missing = missing_spans(clauses, settings, task.splits[0], None if is_cut_short else limit)
    parts.tried(parts.add, missing, of_hooks=True)
    parts.add(task.plan_problems(plan, settings), of_hooks=True)
    if settings.compute.strategy == "none" or loss is None:
        return []
    return parts.tried(check_ranks, plan, model, loss, settings, trains=task.trains) or []


def prepare_alone(
    experiment: Experiment, hooks: Callable[[nn.Module], Spec], split: Split, trust: frozenset[str]
) -> Prepared:
    """The experiment with these hooks instead of its own, tried in training mode, without the checks of its task.

    They do not ask which dimensions are the batch.

    Raises SpecError or CompileError with every mistake.
    """
    parts = build(experiment, split, trust)
    parts.refuse()
    info, model, experiment = parts.data, parts.model, parts.experiment
    assert info is not None and model is not None  # else there is a mistake
    runs = RunValues.of(experiment, split, info)
    example = as_call(info.example(EXAMPLE_BATCH), model)
    plan = compile_plan(hooks(model), model, values=runs, example=example, two=None, training=True)
    return parts.prepared(plan, experiment.notes)


def without_data(
    experiment: Experiment,
    hooks: Callable[[nn.Module], Spec],
    split: Split | None,
    error: SpecError,
    trust: frozenset[str],
) -> Prepared:
    """Compile the hooks for a model that does not depend on the data, which is missing, as `error` says.

    The result can only be shown: shapes are not checked, and the plan says why.

    Raises `error` if something else is invalid too, or if the model needs the data; CompileError for the hooks.
    """
    if not all(problem.where.startswith("data.") for problem in error.errors):
        raise error
    parts = build(experiment, split or SPLITS[0], trust, with_data=False)
    if parts.model is None:
        raise error from None
    experiment = parts.experiment
    parts.data = DataInfo(experiment.settings.data.name, {}, None, None, {"train": 0, "val": 0})
    runs = RunValues.of(experiment, split)
    plan = compile_plan(hooks(parts.model), parts.model, values=runs)
    why = "; ".join(f"{problem.where}: {problem.what}" for problem in error.errors)
    return parts.prepared(replace(plan, unchecked=why), experiment.notes)
