"""`task=plan` takes the place of an experiment's own task: what that was, for its plan is what is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hookrun.spec import Experiment, parse_experiment

UNDER_HOOKS = frozenset({"train", "evaluate", "predict", "export"})


def planned(
    experiment: Experiment, overrides: Sequence[str], compose: Callable[[list[str]], dict[str, Any]]
) -> Experiment:
    """The experiment to plan: with the task that it has without `task=plan`; any other experiment as it is.

    compose: overrides -> the configuration
    """
    if experiment.settings.task.name != "plan":
        return experiment
    own = parse_experiment(compose([text for text in overrides if text != "task=plan"]))
    return own if own.settings.task.name in UNDER_HOOKS else experiment
