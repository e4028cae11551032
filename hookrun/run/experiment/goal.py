"""The objective of an experiment: the metric of its task by which the best job of a sweep is chosen. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hookrun.errors import Problem, SpecError, listed, misnamed, nearest
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.experiment.task import Task, metrics_of, stopping, task_of
from hookrun.store.objective import Direction, Goal, direction_of, preferred

METRIC = "objective.metric"
_SHOWN = 8
"""The metrics that a message lists."""


def goal_of(experiment: Experiment) -> Goal | None:
    """The objective of the experiment; None if the run does not log the metric or the direction is not known.

    Raises SpecError if the data cannot be described.
    """
    objective, task = experiment.settings.objective, task_of(experiment)
    measured = task.measures(experiment.settings)
    metric = objective.metric or _first_metric(task, measured) or preferred(measured)
    if stopping(experiment) is not None or metric is None or metric not in measured:
        return None
    direction = objective.direction or measured[metric]
    return None if direction is None else Goal(metric, direction, objective.of)


def _first_metric(task: Task, measured: Mapping[str, Direction | None]) -> str | None:
    """The first of `task.metrics` that has a direction, of the val split if there is one; None without any."""
    for metric in metrics_of(task) or ():
        names = (metric.name, metric.name.rpartition(":")[2])  # a user's function is logged by its own name
        of_splits = [name for name in measured if name.rpartition("/")[2] in names and measured[name]]
        if of_splits:
            return max(of_splits, key=lambda name: name.startswith("val/"))
    return None


def required_goal(experiment: Experiment) -> Goal:
    """The objective, for a sweeper that optimizes it. Raises SpecError with the reason if there is none."""
    goal = goal_of(experiment)
    if goal is None:
        raise SpecError([_why_none(experiment)])
    return goal


def check_objective(experiment: Experiment, others: Iterable[str]) -> None:
    """Raise SpecError if no task logs the metric of the objective.

    A metric of a split or an analysis that only another task logs is accepted: one file may be used with several tasks.

    others: the first parts of the names of metrics of other tasks: splits and names of analyses
    """
    metric = experiment.settings.objective.metric
    if metric is None:
        return
    measured = task_of(experiment).measures(experiment.settings)
    logged_parts = {name.rpartition("/")[0] for name in measured}
    part = metric.rpartition("/")[0]
    if part in set(others) - logged_parts and direction_of(metric) is not None:
        return
    if measured and goal_of(experiment) is None:
        raise SpecError([_why_none(experiment)])


def _why_none(experiment: Experiment) -> Problem:
    metric, task = experiment.settings.objective.metric, task_of(experiment)
    hook = stopping(experiment)
    if hook is not None:
        return Problem(
            METRIC,
            f"{hook.name} stops the forward before the model's output, so the run logs no metrics",
            f"leave the hook out: ~{hook.where}",
        )
    measured = task.measures(experiment.settings)
    if not measured:
        return Problem(
            METRIC,
            f"task={task.name} logs neither accuracy nor loss, nor another metric to optimize",
            "use task=train or evaluate, or a sweeper that does not optimize",
        )
    if metric is None:
        return Problem(METRIC, "is not given", f"name one; {nearest('', measured)}")
    if metric in measured:
        return Problem(
            "objective.direction",
            f"is not known for {metric!r}: is a larger value better, or a smaller one?",
            "write maximize or minimize",
        )
    near = nearest(metric, measured)
    hint = f"task={task.name} logs {listed(measured, _SHOWN)}"
    if near.startswith("did you mean"):
        hint = f"{near} {hint}"
    return misnamed(METRIC, f"found {metric!r}, which this run does not log", metric, measured, hint)
