"""Experiment -> Ready -> run directory, or what is shown on the screen. Each module here that defines a task adds it.

Importing this package imports no torch: a configuration is validated without it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from hookrun import spec
from hookrun.discovery import discovered
from hookrun.errors import HookrunError, Problem, Refusal, SpecError
from hookrun.spec import Experiment
from hookrun.spec.remains import beyond, in_file_order
from hookrun.tasks.base import Ready, Task, task_of

__all__ = [
    "Ready",
    "Task",
    "in_order_of",
    "objective",
    "parse_experiment",
    "prepare",
    "refusal",
    "run",
    "show",
    "task_of",
    "tasks",
]


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
            prepare(replace(experiment, mistakes=tuple(problems)), trust=trust)
        except Refusal as more:
            problems += beyond(more.errors, problems)
            notes = more.notes
        except HookrunError:  # what it names cannot be read: told once the configuration is right
            pass
    return SpecError(in_file_order(problems, config), notes)


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
        hint = "start it without torchrun; hooks in a distributed loop of your own: `with hookrun.hooked(model, spec)`"
        raise SpecError([Problem("compute", what, hint)])


def show(ready: Ready) -> None:
    """Print what the task shows. Raises HookrunError for a task that is run."""
    ready.task.show(ready)


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
