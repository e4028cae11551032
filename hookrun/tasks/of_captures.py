"""Tasks that look at what a run captured. They need neither a model nor hooks, and write a run directory."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from hookrun.errors import Problem, SpecError
from hookrun.spec import Experiment
from hookrun.tasks.base import Task, changed

if TYPE_CHECKING:
    from hookrun.store.run_dir import RunDir
    from hookrun.tasks.loop.analysis import Analysing, Analysis
    from hookrun.tasks.loop.features import Features

MOST_BYTES = 2**50
MOST_FEATURES = 2**24


class TaskOfCaptures(Task):
    """Base of the tasks that look at what a run captured.

    run:       the directory of that run
    capture:   which of its hooks; None: the only one
    max_bytes: of memory that the analysis may take; what it will take is estimated before it begins
    project:   project rows of more features at random to so many; None: no row is projected
    """

    run: str | None = None
    capture: str | None = None
    max_bytes: Annotated[int, Field(ge=1, le=MOST_BYTES, strict=True)] = 2**31
    project: Annotated[int | None, Field(ge=1, le=MOST_FEATURES, strict=True)] = None

    @abstractmethod
    def analyse(self, analysing: Analysing) -> None:
        """Do the analysis; its results go to metrics.jsonl."""

    def unused(self, experiment: Experiment) -> list[str]:
        """Hooks, and what is about running a model: the captures are there."""
        settings = experiment.settings
        hooks = ["hooks"] if experiment.hooks.hooks else []
        return [*changed("train", settings.train), *changed("compute", settings.compute), *hooks]

    def problem(self, analysis: Analysis) -> Problem | None:
        """Why the run cannot be analysed, or None."""
        return None

    def prepare(self, experiment: Experiment, *, trust: frozenset[str]) -> Analysis:
        """Find the run and its captures. Raises SpecError with what is missing."""
        from hookrun.tasks.loop.analysis import find

        analysis = find(experiment, self.run, self.capture)
        if problem := self.problem(analysis):
            raise SpecError([problem])
        return analysis

    def execute(self, prepared: Analysis, run_dir: RunDir) -> str | None:
        """Do the analysis; no check can stop it."""
        from hookrun.store.environment import environment
        from hookrun.tasks.loop.analysis import Analysing
        from hookrun.tasks.loop.progress import Screen
        from hookrun.tasks.loop.resuming import results_of

        screen = Screen()
        if run_dir.resumed is not None:
            screen.say(f"goes on from {run_dir.resumed.path.name}")
        run_dir.write_env(environment() | {"runs": [run.to_dict() for run in prepared.runs]})
        screen.say(f"{self.name} of {prepared.run.path}: {', '.join(prepared.captures)}")
        screen.note(prepared.experiment.notes)
        self.analyse(Analysing(prepared, run_dir, screen, results_of(prepared, run_dir)))
        screen.say(f"run directory: {run_dir.path}")
        return None

    def features(self, analysis: Analysis) -> dict[str, Features]:
        """Module -> its rows as vectors, projected where that was asked for."""
        from hookrun.tasks.loop.analysis import features_of

        return features_of(analysis, self.max_bytes, self.project)

    def say_memory(self, analysing: Analysing, needed: int) -> None:
        """Tell what the analysis will take."""
        from hookrun.plan.table import size

        allowed = size(self.max_bytes)
        analysing.screen.say(f"memory: about {size(needed)} of the {allowed} that task.max_bytes allows")

    def say_projections(self, analysing: Analysing) -> None:
        """Tell which modules were projected, and how."""
        projected = [each for each in self.features(analysing.analysis).values() if each.projection]
        if projected:
            names = ", ".join(each.name for each in projected)
            analysing.screen.say(f"{projected[0].projection}, instead of all features: {names}")
