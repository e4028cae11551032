"""Experiment -> Ready -> run directory or printed output. Each module here that defines a Task subclass registers it.

Importing this package imports no torch: a configuration is validated without it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from hookrun import spec
from hookrun.data.info import SPLITS
from hookrun.discovery import discovered
from hookrun.errors import CompileError, HookrunError, Problem, Refusal, SpecError, listed
from hookrun.ranks.alone import ALONE, Ranks
from hookrun.spec import Experiment
from hookrun.spec.experiment import RunWeights
from hookrun.spec.needs import PREVIOUS
from hookrun.spec.remains import beyond, in_file_order
from hookrun.tasks.base import Ready, Task, task_of
from hookrun.tasks.goals import check_objective, goal_of, required_goal
from hookrun.trust import of_environment, read_once

__all__ = [
    "Checked",
    "Ready",
    "Task",
    "check_jobs",
    "goal_of",
    "in_order_of",
    "objective",
    "parse_experiment",
    "prepare",
    "refusal",
    "required_goal",
    "run",
    "show",
    "task_of",
    "tasks",
]


@dataclass(frozen=True)
class Checked:
    """The result of checking the jobs of a sweep.

    refused:  job number -> the error that its run would raise
    proven:   number of trial runs that were made
    unproven: number of jobs whose shapes were not checked, because the time was up
    """

    refused: Mapping[int, SpecError | CompileError]
    proven: int
    unproven: int


@cache
def tasks() -> Mapping[str, type[Task]]:
    """Every task class by its name."""
    return discovered(sys.modules[__name__], Task, "task_name")  # type: ignore[type-abstract]


def parse_experiment(config: Mapping[str, Any]) -> Experiment:
    """Validate the root mapping of a composed configuration. Raises SpecError with all mistakes in it.

    The notes of the returned experiment name the settings that its task does not use.
    """
    experiment = spec.parse_experiment(config, tasks())
    task = task_of(experiment)
    if not (unused := task.unused(experiment)):
        return experiment
    verb = "is" if len(unused) == 1 else "are"
    note = f"{', '.join(unused)} {verb} not used by task={task.name}"
    return replace(experiment, notes=(*experiment.notes, note))


def prepare(experiment: Experiment, *, trust: frozenset[str] = frozenset()) -> Ready:
    """Check everything that can be checked before the run directory is created.

    trust: names of the packages whose code the experiment may use

    Raises SpecError or CompileError.
    """
    trust = trust | of_environment()
    with read_once(trust):
        try:
            experiment = _with_found_weights(experiment)
            check_objective(experiment, [*SPLITS, *tasks()])
        except SpecError as error:
            mistakes = (*experiment.mistakes, *error.errors)
            experiment = _without_run_weights(replace(experiment, mistakes=mistakes))
            task_of(experiment).prepare(experiment, trust=trust)
            raise
        return task_of(experiment).prepare(experiment, trust=trust)


def check_jobs(
    jobs: Mapping[int, Experiment], seconds: float, *, trust: frozenset[str] = frozenset()
) -> Checked:
    """Check the jobs of a sweep as far as possible before the first of them runs; writes nothing.

    jobs:    job number -> experiment
    seconds: time limit, after which the remaining jobs check the shapes of their hooks when they run
    """
    from hookrun.tasks.loop.shared import SharedMaker, model_key

    shared, refused = SharedMaker(seconds), dict[int, SpecError | CompileError]()
    trust = trust | of_environment()
    with read_once(trust):
        for number in sorted(jobs, key=lambda number: model_key(jobs[number].settings)):
            try:
                experiment = _with_found_weights(jobs[number])
                check_objective(experiment, [*SPLITS, *tasks()])
                task_of(experiment).check(experiment, trust=trust, shared=shared)
            except (SpecError, CompileError) as error:
                refused[number] = error
    return Checked(refused, shared.proven, shared.unproven)


def _with_found_weights(experiment: Experiment) -> Experiment:
    """The experiment, with `model.weights` of another run replaced by its checkpoint. SpecError if there is none."""
    if not isinstance(experiment.settings.model.weights, RunWeights):
        return experiment  # the import below needs torch, which tasks that analyse captures may not need
    from hookrun.run_values import with_found_weights

    return with_found_weights(experiment)


def _without_run_weights(experiment: Experiment) -> Experiment:
    """The experiment without weights of another run, to find further mistakes in an experiment that is refused."""
    settings = experiment.settings
    if not isinstance(settings.model.weights, RunWeights):
        return experiment
    model = settings.model.model_copy(update={"weights": None})
    return replace(experiment, settings=settings.model_copy(update={"model": model}))


def refusal(
    config: Mapping[str, Any], *, known: Sequence[Problem] = (), trust: frozenset[str] = frozenset()
) -> SpecError:
    """All mistakes in a configuration that is refused, in the order of the file.

    They include the mistakes that `prepare` finds in the valid rest of the configuration.

    known: mistakes in the command line, which are not part of the configuration
    """
    experiment, found = spec.read_experiment(config, tasks())
    problems = [*known, *beyond(found, known)]
    notes: tuple[str, ...] = ()
    if experiment is not None:
        try:
            runs = {**_pending_runs(config), **experiment.runs}
            prepare(replace(experiment, mistakes=tuple(problems), runs=runs), trust=trust)
        except Refusal as more:
            problems += beyond(more.errors, problems)
            notes = more.notes
        except HookrunError:  # a file or run cannot be read: reported when the configuration is valid
            pass
    return SpecError(in_file_order(problems, config), notes)


def _pending_runs(config: Mapping[str, Any]) -> dict[str, None]:
    """The names of the runs in `needs`, valid or not, and of the previous run, each with None: not run yet."""
    needs = config.get("needs")
    return dict.fromkeys([PREVIOUS, *(map(str, needs) if isinstance(needs, Mapping) else ())])


@contextmanager
def in_order_of(config: Mapping[str, Any]) -> Iterator[None]:
    """Sort the mistakes of a Refusal raised in the block by the order of their keys in the configuration."""
    try:
        yield
    except Refusal as error:
        raise type(error)(in_file_order(error.errors, config), error.notes) from error


def refuse_ranks() -> None:
    """Raise SpecError if torchrun started this process as one of several: each would do a whole run of its own."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks.isdecimal() and int(ranks) > 1:
        what = f"found {ranks} processes (WORLD_SIZE), and a run uses one"
        hint = (
            "compute=ddp splits one run over them; hooks in a distributed loop of your own: "
            "`with hookrun.hooked(model, spec)`"
        )
        raise SpecError([Problem("compute", what, hint)])


def show(ready: Ready) -> None:
    """Print the output of a task such as `plan`. Raises HookrunError for a task that needs a run directory."""
    ready.task.show(ready)


def show_without_data(experiment: Experiment, error: SpecError, trust: frozenset[str]) -> None:
    """Print the plan without shapes, if `error` says only that the data is missing; otherwise raise `error`."""
    from hookrun.tasks.under_hooks import TaskUnderHooks

    task = task_of(experiment)
    if not isinstance(task, TaskUnderHooks):
        raise error
    from hookrun.tasks.loop.prepared import compiled_without_data

    split, experiment = task.only_split(), _with_found_weights(experiment)
    task.show(compiled_without_data(experiment, experiment.hooks, split, error, trust))


def run(ready: Ready, path: Path, *, go_on: bool = False, anyway: bool = False, ranks: Ranks = ALONE) -> int:
    """Run the task in the directory `path`.

    go_on:  resume an unfinished run in its directory, from the newest saved state
    anyway: resume even if that state was saved with another configuration, model, data or version
    ranks:  the processes of the run; this process is rank 0

    Returns 0, or 3 if a check with policy `stop` ended the run. An exception is written to status.json before it is
    raised.
    """
    from hookrun.tasks.loop.execute import execute

    return execute(ready, path, go_on=go_on, anyway=anyway, ranks=ranks)


def objective(run_dir: Path) -> float:
    """The value that an optimizing sweeper optimizes: the run's recorded objective, or one chosen from its metrics.

    Raises HookrunError if the run has no finite value of it: `predict` logs no metric, and a loss may be NaN.
    """
    from hookrun.store.reader import open_run
    from hookrun.store.scores import names, result_of

    run = open_run(run_dir)
    result = result_of(run.status, run.metrics)
    if result is None:
        raise HookrunError(f"{run_dir} has neither accuracy nor loss to optimize: use task=train or evaluate")
    if result.value is None:
        there = listed(names(run.metrics), 8) or "none"
        what = f"{result.goal.metric} has no finite value in {run_dir}; metrics with one: {there}"
        raise HookrunError(what)
    return result.value
