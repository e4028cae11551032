"""Experiment -> Ready -> run directory, or what is shown on the screen. Each module here that defines a task adds it.

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
    """What came of checking the jobs of a sweep.

    refused:  number -> what is wrong with the job
    proven:   fake runs that were made
    unproven: jobs whose shapes were left unchecked when time was up
    """

    refused: Mapping[int, SpecError | CompileError]
    proven: int
    unproven: int


@cache
def tasks() -> Mapping[str, type[Task]]:
    """Every task by name."""
    return discovered(sys.modules[__name__], Task, "task_name")  # type: ignore[type-abstract]


def parse_experiment(config: Mapping[str, Any]) -> Experiment:
    """Validate the root mapping of a composed configuration. Raises SpecError with every mistake in it.

    The notes of the experiment say which of its settings its task does not use.
    """
    experiment = spec.parse_experiment(config, tasks())
    task = task_of(experiment)
    if not (unused := task.unused(experiment)):
        return experiment
    verb = "is" if len(unused) == 1 else "are"
    note = f"{', '.join(unused)} {verb} not used by task={task.name}"
    return replace(experiment, notes=(*experiment.notes, note))


def prepare(experiment: Experiment, *, trust: frozenset[str] = frozenset()) -> Ready:
    """Check everything that can be checked before there is a run directory.

    trust: packages that a user's own code may come from

    Raises SpecError and CompileError.
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
    """Check everything that can be checked before any of the jobs of a sweep runs; nothing is written.

    jobs:    number -> experiment
    seconds: after so many, hooks whose shapes were not yet checked are left to the jobs themselves
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
    """The experiment with the weights that another run has trained. Raises SpecError where there are none."""
    if not isinstance(experiment.settings.model.weights, RunWeights):
        return experiment  # without torch, which tasks that analyse captures may not need
    from hookrun.run_values import with_found_weights

    return with_found_weights(experiment)


def _without_run_weights(experiment: Experiment) -> Experiment:
    """For an experiment that is refused anyway."""
    settings = experiment.settings
    if not isinstance(settings.model.weights, RunWeights):
        return experiment
    model = settings.model.model_copy(update={"weights": None})
    return replace(experiment, settings=settings.model_copy(update={"model": model}))


def refusal(
    config: Mapping[str, Any], *, known: Sequence[Problem] = (), trust: frozenset[str] = frozenset()
) -> SpecError:
    """Everything wrong with a configuration that is refused, in the order of the file.

    Beside its own mistakes stand those that `prepare` finds in what is left without them.

    known: mistakes in what was typed, which the configuration does not hold
    """
    experiment, found = spec.read_experiment(config, tasks())
    problems = [*known, *beyond(found, known)]
    notes: tuple[str, ...] = ()
    if experiment is not None:
        try:
            runs = {**_still_to_be_made(config), **experiment.runs}
            prepare(replace(experiment, mistakes=tuple(problems), runs=runs), trust=trust)
        except Refusal as more:
            problems += beyond(more.errors, problems)
            notes = more.notes
        except HookrunError:  # what it names cannot be read: told once the configuration is right
            pass
    return SpecError(in_file_order(problems, config), notes)


def _still_to_be_made(config: Mapping[str, Any]) -> dict[str, None]:
    """The names of the runs that are made or looked for once the configuration is right; wrong needs are named too."""
    needs = config.get("needs")
    return dict.fromkeys([PREVIOUS, *(map(str, needs) if isinstance(needs, Mapping) else ())])


@contextmanager
def in_order_of(config: Mapping[str, Any]) -> Iterator[None]:
    """What is refused in the block lists its mistakes in the order in which the configuration names their keys."""
    try:
        yield
    except Refusal as error:
        raise type(error)(in_file_order(error.errors, config), error.notes) from error


def refuse_ranks() -> None:
    """SpecError where the process is one of several, as torchrun starts them: each would do a whole run of its own."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks.isdecimal() and int(ranks) > 1:
        what = f"found {ranks} processes (WORLD_SIZE), and a run uses one"
        hint = (
            "compute=ddp splits one run over them; hooks in a distributed loop of your own: "
            "`with hookrun.hooked(model, spec)`"
        )
        raise SpecError([Problem("compute", what, hint)])


def show(ready: Ready) -> None:
    """Print what the task shows. Raises HookrunError for a task that is run."""
    ready.task.show(ready)


def show_without_data(experiment: Experiment, error: SpecError, trust: frozenset[str]) -> None:
    """Print the plan without shapes, where `error` finds the data missing; raises `error` where that cannot be done."""
    from hookrun.tasks.under_hooks import TaskUnderHooks

    task = task_of(experiment)
    if not isinstance(task, TaskUnderHooks):
        raise error
    from hookrun.tasks.loop.prepared import compiled_without_data

    split, experiment = task.split_met(), _with_found_weights(experiment)
    task.show(compiled_without_data(experiment, experiment.hooks, split, error, trust))


def run(ready: Ready, path: Path, *, go_on: bool = False, anyway: bool = False, ranks: Ranks = ALONE) -> int:
    """Run the task in the directory `path`.

    go_on:  in the directory of a run that did not come to its end, from the newest state there
    anyway: also where that state is of another configuration, model, data or version
    ranks:  the processes of the run, of which this is rank 0

    Returns 0, or 3 if a check with policy `stop` ended the run. Whatever is raised is in status.json before.
    """
    from hookrun.tasks.loop.run import run_in

    return run_in(ready, path, go_on=go_on, anyway=anyway, ranks=ranks)


def objective(run_dir: Path) -> float:
    """What an optimizing sweeper optimizes: the objective that the run says it has, else that of its metrics.

    Raises HookrunError where the run has no finite value of it: `predict` logs none, and a loss may be NaN.
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
