"""The objective of an experiment: the metric by which its runs are compared, and whether to minimize or maximize it."""

from __future__ import annotations

from collections.abc import Iterable

from hookrun.errors import Problem, SpecError, listed, nearest
from hookrun.spec import Experiment
from hookrun.spec.objective import Goal, direction_of, preferred
from hookrun.tasks.base import task_of

METRIC = "objective.metric"
_SHOWN = 8


def goal_of(experiment: Experiment) -> Goal | None:
    """The objective of the experiment; None if its task does not log the metric or the direction is not known.

    Raises SpecError if the data cannot be described.
    """
    asked, there = experiment.settings.objective, task_of(experiment).measures(experiment.settings)
    metric = asked.metric or preferred(there)
    if metric is None or metric not in there:
        return None
    direction = asked.direction or there[metric]
    return None if direction is None else Goal(metric, direction, asked.of)


def required_goal(experiment: Experiment) -> Goal:
    """The objective, for a sweeper that optimizes it. Raises SpecError with the reason if there is none."""
    goal = goal_of(experiment)
    if goal is None:
        raise SpecError([_why_none(experiment)])
    return goal


def check_objective(experiment: Experiment, others: Iterable[str]) -> None:
    """Raise SpecError if no task logs the metric of the objective.

    A metric that only another task logs is accepted: one file may be used with several tasks.

    others: the first parts of the names of metrics of other tasks: splits and names of analyses
    """
    metric = experiment.settings.objective.metric
    if metric is None or (metric.rpartition("/")[0] in set(others) and direction_of(metric) is not None):
        return
    if task_of(experiment).measures(experiment.settings) and goal_of(experiment) is None:
        raise SpecError([_why_none(experiment)])


def _why_none(experiment: Experiment) -> Problem:
    metric, task = experiment.settings.objective.metric, task_of(experiment)
    there = task.measures(experiment.settings)
    if not there:
        what = f"task={task.name} logs neither accuracy nor loss, nor another metric to optimize"
        return Problem(METRIC, what, "use task=train or evaluate, or a sweeper that does not optimize")
    if metric is None:
        return Problem(METRIC, "is not given", f"name one; {nearest('', there)}")
    if metric in there:
        what = f"is not known for {metric!r}: is a larger value better, or a smaller one?"
        return Problem("objective.direction", what, "write maximize or minimize")
    near, every = nearest(metric, there), f"task={task.name} logs {listed(there, _SHOWN)}"
    hint = f"{near} {every}" if near.startswith("did you mean") else every
    return Problem(METRIC, f"found {metric!r}, which this run does not log", hint)
