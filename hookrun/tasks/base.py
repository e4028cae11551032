"""What a task is: its own keys, what it does to be ready, and what it then runs or shows. Imports no torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from hookrun.errors import HookrunError
from hookrun.spec import Experiment, Settings, TaskKeys
from hookrun.spec.experiment import Section
from hookrun.spec.metric import MetricKeys
from hookrun.spec.objective import Direction
from hookrun.spec.tokens import Tokens

if TYPE_CHECKING:
    from hookrun.run_values import UsedRun
    from hookrun.store.run_dir import RunDir


class Task(TaskKeys):
    """Base of the tasks. One subclass with a `task_name` is one task; its fields are its own keys in `task:`.

    What a task declares here and in its methods is all that the rest of the program knows of it. Its module is
    imported to validate a configuration, and therefore imports torch, and what imports torch, inside functions only.

    shows:        it is shown by `show` and leaves nothing behind; else it is run by `execute` in a run directory
    has_plan:     hooks are compiled for it, and `show` prints their plan
    trains:       it trains the model: hooks are proven in training mode, optimizer and schedule are checked
    splits_batches: several ranks can split its batches, and what it tells is that of all rows
    takes_place:  it is typed in place of the experiment's own task, and shows the plan of that one
    """

    shows: ClassVar[bool] = False
    has_plan: ClassVar[bool] = False
    trains: ClassVar[bool] = False
    splits_batches: ClassVar[bool] = False
    takes_place: ClassVar[bool] = False

    @abstractmethod
    def prepare(self, experiment: Experiment, *, trust: frozenset[str]) -> Ready:
        """Check everything that can be checked before there is a run directory. Writes nothing.

        trust: packages that a user's own code may come from

        Raises SpecError and CompileError with every mistake found.
        """

    def unused(self, experiment: Experiment) -> list[str]:
        """Key paths of settings that differ from their defaults and that this task does not use."""
        return []

    def measures(self, settings: Settings) -> Mapping[str, Direction | None]:
        """``split/name`` of the metrics that a run logs for its result -> which are better, None where not known.

        Raises SpecError where the data cannot be described.
        """
        return {}

    def check(self, experiment: Experiment, *, trust: frozenset[str], shared: Any) -> None:
        """What `prepare` checks, for one of the jobs of a sweep; raises what it raises.

        shared: a SharedMaker, with what the jobs checked before have made
        """
        self.prepare(experiment, trust=trust)

    def show(self, prepared: Any) -> None:
        """Print what the task shows of what `prepare` returned. Raises HookrunError where it shows nothing."""
        raise HookrunError(f"task={self.name} is run, not shown")

    def execute(self, prepared: Any, run_dir: RunDir) -> str | None:
        """Do the task with what `prepare` returned; returns why a check stopped it, or None.

        Raises HookrunError where the task is only shown.
        """
        raise HookrunError(f"task={self.name} is shown, not run")


def changed(where: str, section: Section, but: Collection[str] = ()) -> list[str]:
    """The keys of a section that differ from their defaults, as key paths.

    where: the key path of the section
    but:   keys that are left out
    """
    fields = type(section).model_fields
    return [
        f"{where}.{key}"
        for key, field in fields.items()
        if key not in but and getattr(section, key) != field.get_default()
    ]


def metrics_of(task: TaskKeys) -> tuple[MetricKeys, ...] | None:
    """`task.metrics`; None where it is not given, or the task has no such key."""
    found: tuple[MetricKeys, ...] | None = getattr(task, "metrics", None)
    return found


def metric_tokens_of(task: TaskKeys) -> Tokens | None:
    """`task.tokens` of a task with metrics: where these are computed; None: at each token that is to be predicted."""
    found: Tokens | None = getattr(task, "tokens", None) if "metrics" in type(task).model_fields else None
    return found


@dataclass(frozen=True)
class Ready:
    """An experiment that was checked and can be run or shown. Each kind of task adds what it starts from."""

    experiment: Experiment

    @property
    def runs(self) -> tuple[UsedRun, ...]:
        """The other runs that it takes values from, as they were found."""
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
    """The task of an experiment that `hookrun.tasks.parse_experiment` validated."""
    return cast(Task, experiment.settings.task)
