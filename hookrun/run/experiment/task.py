"""The base class of tasks: a task's own keys, its preparation, and what it runs or prints.

Imports no torch.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, cast

from hookrun.engine.spec import HookSpec
from hookrun.engine.spec.tokens import Tokens
from hookrun.engine.validation import Section
from hookrun.errors import CompileError, HookrunError
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.experiment.settings import Settings, TaskKeys
from hookrun.run.experiment.task_keys import BackwardPass
from hookrun.store.objective import MOST_ROWS, Direction, MetricKeys

if TYPE_CHECKING:
    from hookrun.engine.plan.outside import UsedRun
    from hookrun.store.run_dir import RunDir


class Task(TaskKeys):
    """Base of the tasks. One subclass with a `task_name` is one task; its fields are its own keys in `task:`.

    The rest of the program uses only these declarations and methods of a task. Its module is imported to validate a
    configuration; therefore it imports torch, and modules that import torch, inside functions only.

    shows:          `show` prints its result and nothing is written; otherwise `execute` runs it in a run directory
    in_python:      of a task that `shows`: what gives the same in Python, where a run cannot be opened
    has_plan:       hooks are compiled for it, and `show` prints their plan
    trains:         it trains the model: hooks are tried in training mode, optimizer and schedule are checked
    splits_batches: several ranks can split its batches, and its results are computed from all rows
    writes_rows:    it writes results for each row, on several ranks each its own
    repeats_passes: it also runs the model for itself, `RunContext.silently`, and needs no hook on a parameter
    """

    shows: ClassVar[bool] = False
    in_python: ClassVar[str] = ""
    has_plan: ClassVar[bool] = False
    trains: ClassVar[bool] = False
    splits_batches: ClassVar[bool] = False
    writes_rows: ClassVar[bool] = False
    repeats_passes: ClassVar[bool] = False

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

    def as_data(self, prepared: Any) -> dict[str, Any]:
        """What `show` prints, as keys of the object of `--json`."""
        return {}

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
    paths: list[str] = []
    for key, field in type(section).model_fields.items():
        if key not in but and getattr(section, key) != field.get_default():
            paths.append(f"{where}.{key}")
    return paths


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
    for hook in experiment.hooks.hooks:
        if hook.action.does == "stop" and hook.keys.enabled:
            return hook
    return None


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
    sections = (settings.model, settings.data, settings.task, settings.compute)
    dumped = [section.model_dump(mode="json") for section in sections]
    return json.dumps([settings.task.name, str(settings.train.parameters), *dumped])
