"""Recovers the experiment's own task where `task=plan` was typed in its place, so that its plan can be shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hookrun.spec import Experiment
from hookrun.tasks import parse_experiment, task_of


def planned(
    experiment: Experiment, overrides: Sequence[str], compose: Callable[[list[str]], dict[str, Any]]
) -> Experiment:
    """The experiment as it is without `task=plan`, where hooks are compiled for its own task; any other as it is.

    compose: overrides -> the configuration
    """
    task = task_of(experiment)
    if not task.takes_place:
        return experiment
    own = parse_experiment(compose([text for text in overrides if text != f"task={task.name}"]))
    return own if task_of(own).has_plan else experiment
