"""The base classes of tasks that read other runs. They need neither a model nor hooks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from hookrun.errors import spec_error
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.experiment.task import JobCache, Ready, Task, changed
from hookrun.store.config.row_files import RowFiles

if TYPE_CHECKING:
    from hookrun.run.passes.progress import Screen
    from hookrun.run.passes.resuming import Results
    from hookrun.run.tasks.captured.features import Features
    from hookrun.run.tasks.captured.input import Analysis
    from hookrun.store.run_dir import RunDir

MOST_BYTES = 2**50
MOST_FEATURES = 2**24
SUGGESTED = 4096
"""The number of features that an error message suggests for a projection."""


class TaskOfRuns(Task):
    """Base of the tasks that read other runs.

    run:  the directory of the run
    rows: `run` is a folder of files that another program wrote, and which of their tensors are read
    """

    run: str | None = None
    rows: RowFiles | None = None

    @abstractmethod
    def examine(self, prepared: Any, run_dir: RunDir, screen: Screen) -> str | None:
        """Do the task with the result of `prepare`, and write its results. Returns why it stopped with 3, or None."""

    def unused(self, experiment: Experiment) -> list[str]:
        """Hooks, and the sections `train` and `compute`: the captures exist already."""
        settings = experiment.settings
        unused = changed("train", settings.train) + changed("compute", settings.compute)
        if experiment.hooks.hooks:
            unused.append("hooks")
        return unused

    def execute(self, prepared: Any, run_dir: RunDir) -> str | None:
        """Record which runs are read, and do the task."""
        from hookrun.run.passes.progress import Screen
        from hookrun.store.format import ENV
        from hookrun.store.run_dir import environment

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
    def analyse(self, analysis: Analysis, run_dir: RunDir, screen: Screen, results: Results) -> None:
        """Run the analysis and write its results to metrics.jsonl.

        results: those so far
        """

    @abstractmethod
    def check(self, analysis: Analysis) -> None:
        """Raise SpecError if the run cannot be analysed, or the analysis needs more memory than allowed."""

    def prepare(
        self, experiment: Experiment, *, trust: frozenset[str], cache: JobCache | None = None
    ) -> Ready:
        """Find the run and its captures. Raises SpecError if something is missing or does not fit."""
        from hookrun.run.tasks.captured.input import find

        analysis = find(experiment, self.run, self.capture, self.rows, by_token=self.by_token)
        if analysis is None:
            return Ready(experiment)
        self.check(analysis)
        return analysis

    def examine(self, prepared: Analysis, run_dir: RunDir, screen: Screen) -> None:
        """Run the analysis."""
        from hookrun.run.passes.resuming import results_of

        screen.say(f"{self.name} of {prepared.run.path}: {', '.join(prepared.captures)}")
        self.analyse(prepared, run_dir, screen, results_of(prepared, run_dir))

    def features(self, analysis: Analysis, project: int | None) -> dict[str, Features]:
        """Module path -> the rows of its capture as vectors, wider ones projected to so many features."""
        from hookrun.run.tasks.captured.features import Features, Projection

        features: dict[str, Features] = {}
        for name, capture in analysis.captures.items():
            rows = Features.within(self.max_bytes, name, capture)
            if project is not None and rows.captured > project:
                rows = replace(rows, projection=Projection(project, analysis.settings.seed))
            features[name] = rows
        return features

    def require_memory(
        self, analysis: Analysis, what: str, needed: Callable[[int | None], Mapping[str, int]]
    ) -> int:
        """The most bytes that the analysis needs. Raises SpecError if they are more than allowed.

        what:   the analysis, as the subject of the message
        needed: number of features after a projection (None: no projection) -> the bytes needed, by module path
        """
        from hookrun.engine.plan.table import size

        name, most = max(needed(self.project).items(), key=lambda item: item[1])
        if most <= self.max_bytes:
            return most
        rows = self.features(analysis, self.project)[name]
        enough = -(-most // 10**8) * 10**8  # rounded up to a multiple of 100 MB
        steps = [f"allow more (task.max_bytes={enough})"]
        if rows.captured > SUGGESTED and (less := max(needed(SUGGESTED).values())) <= self.max_bytes:
            steps.append(
                f"project at random to fewer features (task.project={SUGGESTED}, which takes {size(less)})"
            )
        raise spec_error(
            "task.max_bytes",
            f"{what} would take about {size(most)} of memory, and {size(self.max_bytes)} are allowed: "
            f"{name} has {len(rows):,} rows of {list(rows.capture.shape[1:])}",
            f"{', '.join(steps)}, or capture fewer samples (train.limit_batches, or the hook's keep) or less of each "
            "(reduce)",
        )

    def say_memory(self, screen: Screen, needed: int) -> None:
        """Print the memory that the analysis needs, in bytes."""
        from hookrun.engine.plan.table import size

        screen.say(f"memory: about {size(needed)} of the {size(self.max_bytes)} that task.max_bytes allows")

    def say_projections(self, screen: Screen, features: Iterable[Features]) -> None:
        """Print which modules were projected, and how."""
        projected = [rows for rows in features if rows.projection]
        if projected:
            names = ", ".join(rows.name for rows in projected)
            screen.say(f"{projected[0].projection}, instead of all features: {names}")
