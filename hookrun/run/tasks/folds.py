"""task=folds: what the action `fold` accumulates, of rows that were captured before."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hookrun.engine.actions.fold import FoldKeys
from hookrun.errors import refused_at, spec_error
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.experiment.task import JobCache, Ready
from hookrun.run.tasks.captured.base import TaskOfRuns

if TYPE_CHECKING:
    from torch import Tensor

    from hookrun.engine.values.folded import Folded
    from hookrun.run.passes.progress import Screen
    from hookrun.run.tasks.captured.input import Analysis
    from hookrun.store.captures.read import StoredCapture
    from hookrun.store.run_dir import RunDir


class FoldsTask(FoldKeys, TaskOfRuns):
    """Accumulates over the rows of each captured module, and writes folds.safetensors.

    capture: the name of the hook that captured; None: the only one of the run
    """

    task_name: ClassVar[str] = "folds"
    capture: str | None = None

    def prepare(
        self, experiment: Experiment, *, trust: frozenset[str], cache: JobCache | None = None
    ) -> Ready:
        """Find the run and its captures, and fold the first row of each. Raises SpecError if something does not fit."""
        from hookrun.run.tasks.captured.input import find

        analysis = find(experiment, self.run, self.capture, self.rows, by_token=True)
        if analysis is None:
            return Ready(experiment)
        for capture in analysis.captures.values():
            with refused_at("task"):
                self._folded(analysis, capture.chosen(slice(0, 1)))
        return analysis

    def examine(self, prepared: Analysis, run_dir: RunDir, screen: Screen) -> None:
        """Fold all rows."""
        screen.say(f"{self.name} of {prepared.run.path}: {', '.join(prepared.captures)}")
        folds: dict[str, dict[str, Folded]] = {}
        for module, capture in prepared.captures.items():
            folds.setdefault(capture.hook, {})[module] = self._folded(prepared, capture)
        run_dir.write_folds(folds)

    def _folded(self, analysis: Analysis, capture: StoredCapture) -> Folded:
        from hookrun.run.tasks.captured.folding import folded

        labels = self._labels(analysis, capture) if self.by == "label" else None
        return folded(self, capture, labels)

    def _labels(self, analysis: Analysis, capture: StoredCapture) -> Tensor:
        """[rows] int64. Raises SpecError if a row does not have one label that is a whole number."""
        with refused_at("task.by", "leave it out"):
            labels = analysis.run.labels_of(capture)
        if labels.dim() > 1 or labels.is_floating_point():
            raise spec_error(
                "task.by", f"the rows of {capture.label} do not have one class each", "leave it out"
            )
        return labels
