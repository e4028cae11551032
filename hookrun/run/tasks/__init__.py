"""Experiment -> Ready -> run directory or printed output. Each module here that defines a Task subclass registers it.

Importing this package imports no torch: a configuration is validated without it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from hookrun.data.info import SPLITS
from hookrun.engine.discovery import Registry
from hookrun.engine.spec import in_file_order
from hookrun.engine.trust import of_environment, read_once
from hookrun.errors import (
    CompileError,
    HookrunError,
    Mistakes,
    Refusal,
    SpecError,
    listed,
    spec_error,
)
from hookrun.run.experiment.experiment import Experiment, read_experiment
from hookrun.run.experiment.goal import check_objective, goal_of, required_goal
from hookrun.run.experiment.names import unknown_names
from hookrun.run.experiment.task import JobCache, Ready, Task, model_key, task_of
from hookrun.run.ranks import size_of_world

__all__ = [
    "JobCache",
    "Ready",
    "Task",
    "check_jobs",
    "goal_of",
    "in_order_of",
    "objective",
    "parse_experiment",
    "prepare",
    "required_goal",
    "show",
    "task_of",
    "tasks",
]


@cache
def tasks() -> Mapping[str, type[Task]]:
    """Every task class by its name."""
    return Registry(sys.modules[__name__], Task, "task_name", "hookrun.studies", "task")  # type: ignore[type-abstract]


def parse_experiment(config: Mapping[str, Any]) -> Experiment:
    """Validate the root mapping of a composed configuration. Raises SpecError with all mistakes in it.

    The notes of the returned experiment name the settings that its task does not use.
    """
    experiment, problems = read_experiment(config, tasks())
    problems += unknown_names(config)
    if experiment is None or problems:
        raise SpecError(in_file_order(problems, config))
    task = task_of(experiment)
    if not (unused := task.unused(experiment)):
        return experiment
    verb = "is" if len(unused) == 1 else "are"
    return replace(
        experiment, notes=(*experiment.notes, f"{', '.join(unused)} {verb} not used by task={task.name}")
    )


def prepare(
    experiment: Experiment, *, trust: frozenset[str] = frozenset(), cache: JobCache | None = None
) -> Ready:
    """Check everything that can be checked before the run directory is created.

    trust: names of the packages whose code the experiment may use
    cache: models and trial runs of the sweep's jobs that were checked before

    Raises SpecError, or CompileError where only hooks do not fit the model, with every mistake.
    """
    trust = trust | of_environment()
    mistakes = Mistakes()
    with read_once(trust):
        mistakes.tried(check_objective, experiment, chain(SPLITS, tasks()))
        ready = mistakes.tried(task_of(experiment).prepare, experiment, trust=trust, cache=cache)
    mistakes.refuse()
    assert ready is not None  # else there is a mistake
    return ready


def check_jobs(
    jobs: Mapping[int, Experiment], cache: JobCache, *, trust: frozenset[str] = frozenset()
) -> dict[int, SpecError | CompileError]:
    """Check the jobs of a sweep as far as possible before the first of them runs; writes nothing.

    jobs:  job number -> experiment
    cache: what jobs have in common; it counts the trial runs, and after its time limit makes no more of them

    Returns job number -> the error that its run would raise.
    """
    refused: dict[int, SpecError | CompileError] = {}
    for number in sorted(jobs, key=lambda number: model_key(jobs[number].settings)):
        try:
            prepare(jobs[number], trust=trust, cache=cache)
        except (SpecError, CompileError) as error:
            refused[number] = error
    return refused


@contextmanager
def in_order_of(config: Mapping[str, Any]) -> Iterator[None]:
    """Sort the mistakes of a Refusal raised in the block by the order of their keys in the configuration."""
    try:
        yield
    except Refusal as error:
        raise type(error)(in_file_order(error.errors, config), error.notes) from error


def refuse_ranks() -> None:
    """Raise SpecError if torchrun started this process as one of several: each would do a whole run."""
    if (ranks := size_of_world()) > 1:
        raise spec_error(
            "compute",
            f"found {ranks} processes (WORLD_SIZE), and a run uses one",
            (
                "compute=ddp splits one run over them; hooks in a distributed loop of your own: "
                "`with hookrun.hooked(model, spec)`"
            ),
        )


def show(ready: Ready) -> None:
    """Print the output of a task such as `plan`. Raises HookrunError for a task that needs a run directory."""
    ready.task.show(ready)


def show_without_data(experiment: Experiment, error: SpecError, trust: frozenset[str]) -> None:
    """Print the plan without shapes, if `error` says only that the data is missing; otherwise raise `error`."""
    from hookrun.run.tasks.under_hooks import TaskUnderHooks

    task = task_of(experiment)
    if not isinstance(task, TaskUnderHooks):
        raise error
    from hookrun.run.experiment.prepare import without_data

    task.show(without_data(experiment, lambda model: experiment.hooks, task.only_split(), error, trust))


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
        raise HookrunError(
            f"{result.goal.metric} has no finite value in {run_dir}; metrics with one: "
            f"{listed(names(run.metrics), 8) or 'none'}"
        )
    return result.value
