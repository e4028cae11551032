"""Experiment -> Ready -> run directory, or what is shown on the screen. Each module here that defines a task adds it.

Importing this package imports no torch: a configuration is validated without it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hookrun import spec
from hookrun.discovery import discovered
from hookrun.errors import HookrunError, Problem, SpecError
from hookrun.spec import Experiment
from hookrun.tasks.base import Ready, Task, task_of

__all__ = ["Ready", "Task", "objective", "parse_experiment", "prepare", "run", "show", "task_of", "tasks"]


@cache
def tasks() -> Mapping[str, type[Task]]:
    """Every task by name."""
    return discovered(sys.modules[__name__], Task, "task_name")  # type: ignore[type-abstract]


def parse_experiment(config: Mapping[str, Any]) -> Experiment:
    """Validate the root mapping of a composed configuration. Raises SpecError with every mistake in it."""
    return spec.parse_experiment(config, tasks())


def prepare(experiment: Experiment, *, trust: frozenset[str] = frozenset()) -> Ready:
    """Check everything that can be checked before there is a run directory.

    trust: packages that a user's own code may come from

    Raises SpecError and CompileError.
    """
    return task_of(experiment).prepare(experiment, trust=trust)


def refuse_ranks() -> None:
    """SpecError where the process is one of several, as torchrun starts them: each would do a whole run of its own."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks.isdecimal() and int(ranks) > 1:
        what = f"found {ranks} processes (WORLD_SIZE), and a run uses one"
        hint = "start it without torchrun; hooks in a distributed loop of your own: `with hookrun.hooked(model, spec)`"
        raise SpecError([Problem("compute", what, hint)])


def show(ready: Ready) -> None:
    """Print what the task shows. Raises HookrunError for a task that is run."""
    ready.task.show(ready)


def show_without_data(experiment: Experiment, error: SpecError, trust: frozenset[str]) -> None:
    """Print the plan without shapes, where `error` finds the data missing; raises `error` where that cannot be done."""
    task = task_of(experiment)
    if not task.has_plan:
        raise error
    from hookrun.tasks.loop.prepared import compiled_without_data

    task.show(compiled_without_data(experiment, experiment.hooks, error, trust))


def run(ready: Ready, path: Path) -> int:
    """Run the task in the directory `path`.

    Returns 0, or 3 if a check with policy `stop` ended the run. Whatever is raised is in status.json before.
    """
    from hookrun.tasks.loop.run import run_in

    return run_in(ready, path)


def objective(run_dir: Path) -> float:
    """What an optimizing sweeper optimizes: the best validation accuracy, else the last loss.

    Raises HookrunError where the run has neither, as `predict` has.
    """
    from hookrun.store.reader import open_run

    metrics = open_run(run_dir).metrics
    accuracies = [line["accuracy"] for line in metrics if line.get("split") == "val" and "accuracy" in line]
    losses = [line["loss"] for line in metrics if "loss" in line]
    if not accuracies and not losses:
        raise HookrunError(f"{run_dir} has neither accuracy nor loss to optimize: use task=train or evaluate")
    return float(max(accuracies) if accuracies else losses[-1])
