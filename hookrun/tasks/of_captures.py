"""The base classes of tasks that read other runs. They need neither a model nor hooks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from hookrun.errors import Problem, SpecError
from hookrun.spec import Experiment
from hookrun.tasks.base import JobCache, Task, changed

if TYPE_CHECKING:
    from hookrun.store.run_dir import RunDir
    from hookrun.tasks.analysis.features import Features
    from hookrun.tasks.analysis.input import Analysing, Analysis
    from hookrun.tasks.run.progress import Screen

MOST_BYTES = 2**50
MOST_FEATURES = 2**24


class TaskOfRuns(Task):
    """Base of the tasks that read other runs.

    run: the directory of the run
    """

    run: str | None = None

    @abstractmethod
    def examine(self, prepared: Any, run_dir: RunDir, screen: Screen) -> str | None:
        """Do the task with the result of `prepare`, and write its results. Returns why it stopped with 3, or None."""

    def unused(self, experiment: Experiment) -> list[str]:
        """Hooks, and the sections `train` and `compute`: the captures exist already."""
        settings = experiment.settings
        hooks = ["hooks"] if experiment.hooks.hooks else []
        return [*changed("train", settings.train), *changed("compute", settings.compute), *hooks]

    def execute(self, prepared: Any, run_dir: RunDir) -> str | None:
        """Record which runs are read, and do the task."""
        from hookrun.store.format import ENV
        from hookrun.store.run_dir import environment
        from hookrun.tasks.run.progress import Screen

        screen = Screen()
        if run_dir.resumed is not None:
            screen.say(f"resumed from {run_dir.resumed.path.name}")
        run_dir.write(ENV, environment() | {"runs": [run.model_dump() for run in prepared.runs]})
        screen.note(prepared.experiment.notes)
        stopped = self.examine(prepared, run_dir, screen)
        screen.say(f"run directory: {run_dir.path}")
        return stopped


class TaskOfCaptures(TaskOfRuns):
    """Base of the tasks that analyse the captures of a run.

    capture:   the name of the hook that captured; None: the only one of the run
    max_bytes: the memory that the analysis may use; its need is estimated before it begins
    project:   randomly project rows with more features to this number of features; None: no projection
    by_token:  a sample may have a row for each of its tokens
    """

    by_token: ClassVar[bool] = False
    capture: str | None = None
    max_bytes: Annotated[int, Field(ge=1, le=MOST_BYTES, strict=True)] = 2**31
    project: Annotated[int | None, Field(ge=1, le=MOST_FEATURES, strict=True)] = None

    @abstractmethod
    def analyse(self, analysing: Analysing) -> None:
        """Run the analysis and write its results to metrics.jsonl."""

    def problem(self, analysis: Analysis) -> Problem | None:
        """Why the run cannot be analysed, or None."""
        return None

    def prepare(
        self, experiment: Experiment, *, trust: frozenset[str], cache: JobCache | None = None
    ) -> Analysis:
        """Find the run and its captures. Raises SpecError if something is missing or does not fit."""
        from hookrun.tasks.analysis.input import find

        analysis = find(experiment, self.run, self.capture, by_token=self.by_token)
        if problem := self.problem(analysis):
            raise SpecError([problem])
        return analysis

    def examine(self, prepared: Analysis, run_dir: RunDir, screen: Screen) -> None:
        """Run the analysis."""
        from hookrun.tasks.analysis.input import Analysing
        from hookrun.tasks.run.resuming import results_of

        screen.say(f"{self.name} of {prepared.run.path}: {', '.join(prepared.captures)}")
        self.analyse(Analysing(prepared, run_dir, screen, results_of(prepared, run_dir)))

    def features(self, analysis: Analysis) -> dict[str, Features]:
        """Module path -> the rows of its capture as vectors, projected if `project` is set."""
        from hookrun.tasks.analysis.input import features_of

        return features_of(analysis, self.max_bytes, self.project)

    def too_large(
        self, analysis: Analysis, what: str, needed: Callable[[int | None], Mapping[str, int]]
    ) -> Problem | None:
        """A problem if the analysis needs more memory than allowed.

        what:   the analysis, as the subject of the message
        needed: number of features after a projection (None: no projection) -> the bytes needed, by module path
        """
        from hookrun.tasks.analysis.features import too_large

        by_module = needed(self.project)
        most = max(by_module, key=by_module.__getitem__)
        if by_module[most] <= self.max_bytes:
            return None
        features = self.features(analysis)[most]
        return too_large(what, features, by_module[most], self.max_bytes, lambda to: max(needed(to).values()))

    def say_memory(self, analysing: Analysing, needed: int) -> None:
        """Print the memory that the analysis needs, in bytes."""
        from hookrun.plan.table import size

        allowed = size(self.max_bytes)
        analysing.screen.say(f"memory: about {size(needed)} of the {allowed} that task.max_bytes allows")

    def say_projections(self, analysing: Analysing) -> None:
        """Print which modules were projected, and how."""
        projected = [each for each in self.features(analysing.analysis).values() if each.projection]
        if projected:
            names = ", ".join(each.name for each in projected)
            analysing.screen.say(f"{projected[0].projection}, instead of all features: {names}")
