"""task=probe: how well a linear model predicts the label from each layer's activations."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from hookrun.errors import Problem, SpecError
from hookrun.spec import Settings
from hookrun.spec.objective import Direction
from hookrun.tasks.of_captures import TaskOfCaptures

if TYPE_CHECKING:
    from torch import Tensor

    from hookrun.data import DataInfo
    from hookrun.tasks.analysis.input import Analysing, Analysis

PROBES = "probes.safetensors"


class ProbeTask(TaskOfCaptures):
    """Fits a linear probe to the captured activations of each module."""

    task_name: ClassVar[str] = "probe"

    def problem(self, analysis: Analysis) -> Problem | None:
        """A problem if the run's data is not known or has no labels, or if the analysis needs too much memory."""
        run = analysis.run
        if not run.config:
            return Problem("task.run", f"{run.path} does not say which data it used", "run it again")
        info = run.data_info()
        if info.target is None:
            return Problem(
                "task.run",
                f"the data {info.name!r} of {run.path} has no targets to probe for",
                "give a run on data that has labels",
            )
        return self.too_large(analysis, "probing", partial(self._needed, analysis, _outputs(info)))

    def _needed(self, analysis: Analysis, outputs: int, project: int | None) -> dict[str, int]:
        """Module path -> the bytes needed while it is probed, including the weights of all probes."""
        from hookrun.tasks.analysis.input import features_of
        from hookrun.tasks.analysis.linear_probe import memory_needed

        every = features_of(analysis, self.max_bytes, project)
        kept = sum(4 * outputs * each.captured for each in every.values())
        return {name: memory_needed(each, outputs) + kept for name, each in every.items()}

    def measures(self, settings: Settings) -> dict[str, Direction | None]:
        """The scores of each probe: accuracies, or for numeric targets r2 under the same names."""
        return {f"{self.name}/accuracy": "maximize", f"{self.name}/train_accuracy": "maximize"}

    def analyse(self, analysing: Analysing) -> None:
        """Fit a probe for each module, log and show the scores, and write the weights.

        Raises SpecError if the labels need more memory than allowed.
        """
        from safetensors.torch import save_file

        from hookrun.tasks.analysis.input import projection_entry, shown_width, table
        from hookrun.tasks.analysis.linear_probe import fit

        analysis, seed = analysing.analysis, analysing.analysis.settings.seed
        features = self.features(analysis)
        shown = table("module", "features", "train", "test", "by chance")
        labels = self._labels(analysis)
        outputs = max(
            each[0].numel() if each.is_floating_point() else len(each.unique()) for each in labels.values()
        )
        if problem := self.too_large(analysis, "probing", partial(self._needed, analysis, outputs)):
            raise SpecError([problem])
        weights: dict[str, Tensor] = {}
        self.say_memory(analysing, max(self._needed(analysis, outputs, self.project).values()))
        for module, rows in features.items():
            probed = analysing.results.get(module)
            if probed is None:
                result = fit(rows, labels[module], seed)
                analysing.run_dir.log_metrics(
                    split=self.name, module=module, score=result.score, samples=len(rows),
                    features=result.features, accuracy=result.test, train_accuracy=result.train, chance=result.chance,
                    **projection_entry(rows),
                )  # fmt: skip
                probed = {"scores": [result.train, result.test, result.chance], "weights": result.weights}
                analysing.results.add(module, probed)
            scores = [f"{value:.3f}" for value in probed["scores"]]
            shown.add_row(module, shown_width(rows), *scores)
            weights |= {f"{module}.{name}": tensor for name, tensor in probed["weights"].items()}
        analysing.screen.console.print(shown)
        self.say_projections(analysing)
        save_file(weights, analysing.run_dir.path / PROBES)
        analysing.run_dir.wrote(analysing.run_dir.path / PROBES)

    def _labels(self, analysis: Analysis) -> dict[str, Tensor]:
        """Module path -> the label of each row, read once for all modules with the same samples."""
        read: dict[bytes, Tensor] = {}
        labels: dict[str, Tensor] = {}
        for module, capture in analysis.captures.items():
            samples = capture.sample_ids.numpy().tobytes() + capture.splits.numpy().tobytes()
            if samples not in read:
                read[samples] = analysis.run.labels_of(capture)
            labels[module] = read[samples]
        return labels


def _outputs(info: DataInfo) -> int:
    """The number of classes or targets; 1 if the number of classes is not known before labels are read."""
    import math

    target = info.target
    if target is not None and target.dtype.is_floating_point:
        return max(math.prod(target.shape), 1)
    return info.num_classes or 1
