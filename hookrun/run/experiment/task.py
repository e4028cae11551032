"""The base class of tasks: a task's own keys, its preparation, what it runs or prints, and its objective.

Imports no torch.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, cast

from hookrun.engine.spec import HookSpec
from hookrun.engine.spec.tokens import Tokens
from hookrun.engine.validation import Section
from hookrun.errors import CompileError, HookrunError, Problem, SpecError, listed, nearest
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.experiment.settings import Settings, TaskKeys
from hookrun.run.experiment.task_keys import BackwardPass
from hookrun.store.objective import MOST_ROWS, Direction, Goal, MetricKeys, direction_of, preferred

if TYPE_CHECKING:
    from hookrun.engine.plan.outside import UsedRun
    from hookrun.store.run_dir import RunDir


class Task(TaskKeys):
    """Base of the tasks. One subclass with a `task_name` is one task; its fields are its own keys in `task:`.

    The rest of the program uses only these declarations and methods of a task. Its module is imported to validate a
    configuration; therefore it imports torch, and modules that import torch, inside functions only.

    shows:          `show` prints its result and nothing is written; otherwise `execute` runs it in a run directory
    has_plan:       hooks are compiled for it, and `show` prints their plan
    trains:         it trains the model: hooks are tried in training mode, optimizer and schedule are checked
    splits_batches: several ranks can split its batches, and its results are computed from all rows
    writes_rows:    it writes results for each row, on several ranks each its own
    repeats_passes: it also runs the model for itself, `standing_in`, and needs no hook on a parameter
    takes_place:    it replaces the experiment's own task on the command line, and prints the plan of that task
    """

    shows: ClassVar[bool] = False
    has_plan: ClassVar[bool] = False
    trains: ClassVar[bool] = False
    splits_batches: ClassVar[bool] = False
    writes_rows: ClassVar[bool] = False
    repeats_passes: ClassVar[bool] = False
    takes_place: ClassVar[bool] = False

    @abstractmethod
    def prepare(
        self, experiment: Experiment, *, trust: frozenset[str], cache: JobCache | None = None
    ) -> Ready:
        """Check everything that can be checked before the run directory is created. Writes nothing.

        trust: names of the packages whose code the experiment may use
        cache: models and trial runs of the sweep's jobs that were checked before

        Raises SpecError or CompileError with all mistakes found.
        """

    def unused(self, experiment: Experiment) -> list[str]:
        """Key paths of settings that differ from their defaults and that this task does not use."""
        return []

    def measures(self, settings: Settings) -> Mapping[str, Direction | None]:
        """``split/name`` of each metric of the result -> whether to minimize or maximize it, or None: not known.

        Raises SpecError if the data cannot be described.
        """
        return {}

    def scored(self) -> tuple[str, BackwardPass] | None:
        """The key path and the score from which backward passes without training start; None: there are none."""
        return None

    def show(self, prepared: Any) -> None:
        """Print the result of `prepare`. Raises HookrunError if the task is run, not shown."""
        raise HookrunError(f"task={self.name} is run, not shown")

    def execute(self, prepared: Any, run_dir: RunDir) -> str | None:
        """Run the task with the result of `prepare`. Returns why a check stopped it, or None.

        Raises HookrunError if the task is only shown.
        """
        raise HookrunError(f"task={self.name} is shown, not run")


def changed(where: str, section: Section, but: Collection[str] = ()) -> list[str]:
    """The key paths of the keys of a section that differ from their defaults.

    where: the key path of the section
    but:   keys to leave out
    """
    fields = type(section).model_fields
    return [
        f"{where}.{key}"
        for key, field in fields.items()
        if key not in but and getattr(section, key) != field.get_default()
    ]


def metrics_of(task: TaskKeys) -> tuple[MetricKeys, ...] | None:
    """`task.metrics`; None if it is not given or the task has no such key."""
    return cast(tuple[MetricKeys, ...] | None, getattr(task, "metrics", None))


def metric_tokens_of(task: TaskKeys) -> Tokens | None:
    """The tokens at which a task computes its metrics, `task.tokens`; None: at each token that is to be predicted."""
    return cast(Tokens | None, getattr(task, "tokens", None)) if hasattr(task, "metrics") else None


def max_rows_of(task: TaskKeys) -> int:
    """`task.max_rows`: how many rows are kept for metrics over the whole split."""
    return cast(int, getattr(task, "max_rows", MOST_ROWS))


@dataclass(frozen=True)
class Ready:
    """An experiment that was checked and can be run or shown. Subclasses add what their tasks start from."""

    experiment: Experiment

    @property
    def runs(self) -> tuple[UsedRun, ...]:
        """The other runs from which the experiment takes values."""
        return ()

    @property
    def settings(self) -> Settings:
        """The settings of the experiment."""
        return self.experiment.settings

    @property
    def task(self) -> Task:
        """The task of the experiment."""
        return task_of(self.experiment)


def task_of(experiment: Experiment) -> Task:
    """The task of an experiment that `hookrun.run.tasks.parse_experiment` validated."""
    return cast(Task, experiment.settings.task)


def stopping(experiment: Experiment) -> HookSpec | None:
    """The first enabled hook that stops the forward before the model's output, or None."""
    return next(
        (hook for hook in experiment.hooks.hooks if hook.action.does == "stop" and hook.keys.enabled), None
    )


class JobCache:
    """What the jobs of a sweep have in common while they are checked: the last model, and results of trial runs.

    Only the last model is kept, so jobs with the same model should be checked one after another. One trial run is made
    for all hooks of the same structure (`hookrun.run.experiment.prepare.structure`), until `seconds` have passed.

    proven:   the number of trial runs that were made
    seen:     structure of hooks -> the output of their trial run
    unproven: the number of jobs whose shapes were not checked, because the time was up
    model:    `model_key` of the last model -> the model with its weights, or the error of building it
    tried:    structure of hooks -> the error of their trial run; None: they fit
    """

    def __init__(self, seconds: float) -> None:
        self.proven = self.unproven = 0
        self.model = dict[str, Any]()
        self.tried = dict[str, CompileError | None]()
        self.seen = dict[str, Any]()
        self._end = monotonic() + seconds

    @property
    def is_over(self) -> bool:
        """Whether the time for trial runs is up."""
        return monotonic() >= self._end


def model_key(settings: Settings) -> str:
    """A key that is equal for jobs with the same model, data, task, `compute` and frozen parameters."""
    dumped = [
        each.model_dump(mode="json")
        for each in [settings.model, settings.data, settings.task, settings.compute]
    ]
    return json.dumps([settings.task.name, str(settings.train.parameters), *dumped])


METRIC = "objective.metric"
_SHOWN = 8


def goal_of(experiment: Experiment) -> Goal | None:
    """The objective of the experiment; None if the run does not log the metric or the direction is not known.

    Raises SpecError if the data cannot be described.
    """
    asked, task = experiment.settings.objective, task_of(experiment)
    there = task.measures(experiment.settings)
    metric = asked.metric or _first_asked(task, there) or preferred(there)
    if stopping(experiment) is not None or metric is None or metric not in there:
        return None
    direction = asked.direction or there[metric]
    return None if direction is None else Goal(metric, direction, asked.of)


def _first_asked(task: Task, there: Mapping[str, Direction | None]) -> str | None:
    """The first of `task.metrics` that has a direction, of the val split if there is one; None without any."""
    for metric in metrics_of(task) or ():
        names = (
            metric.name,
            metric.name.rpartition(":")[2],
        )  # a user's own function is logged by its own name
        of_splits = [name for name in there if name.rpartition("/")[2] in names and there[name]]
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
    there, part = task_of(experiment).measures(experiment.settings), metric.rpartition("/")[0]
    is_of_other = part in set(others) - {name.rpartition("/")[0] for name in there}
    if is_of_other and direction_of(metric) is not None:
        return
    if there and goal_of(experiment) is None:
        raise SpecError([_why_none(experiment)])


def _why_none(experiment: Experiment) -> Problem:
    metric, task = experiment.settings.objective.metric, task_of(experiment)
    if (hook := stopping(experiment)) is not None:
        return Problem(
            METRIC,
            f"{hook.name} stops the forward before the model's output, so the run logs no metrics",
            f"leave the hook out: ~{hook.where}",
        )
    there = task.measures(experiment.settings)
    if not there:
        return Problem(
            METRIC,
            f"task={task.name} logs neither accuracy nor loss, nor another metric to optimize",
            "use task=train or evaluate, or a sweeper that does not optimize",
        )
    if metric is None:
        return Problem(METRIC, "is not given", f"name one; {nearest('', there)}")
    if metric in there:
        return Problem(
            "objective.direction",
            f"is not known for {metric!r}: is a larger value better, or a smaller one?",
            "write maximize or minimize",
        )
    near, every = nearest(metric, there), f"task={task.name} logs {listed(there, _SHOWN)}"
    return Problem(
        METRIC,
        f"found {metric!r}, which this run does not log",
        f"{near} {every}" if near.startswith("did you mean") else every,
    )
