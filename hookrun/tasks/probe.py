"""task=probe: how well a linear model predicts the label of each row from each layer's activations."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from hookrun.config.validation import Section
from hookrun.errors import spec_error
from hookrun.spec import Settings
from hookrun.spec.objective import Direction
from hookrun.tasks.of_captures import TaskOfCaptures

if TYPE_CHECKING:
    from torch import Tensor

    from hookrun.store.run_dir import RunDir
    from hookrun.tasks.analysis.input import Analysis
    from hookrun.tasks.analysis.probing import Labels
    from hookrun.tasks.run.progress import Screen
    from hookrun.tasks.run.resuming import Results

PROBES = "probes.safetensors"
_HEADINGS = ("module", "features", "train", "test", "95 %", "majority", "control")


class LabelsFile(Section):
    """`task.labels`: a CSV file with a header, and the column that holds the labels."""

    file: str
    column: str


class ProbeTask(TaskOfCaptures):
    """Fits a linear probe to the captured activations of each module.

    labels: of each row; None: the target of the sample, or of a token the target at its position; answer: the last
            target of the sample; or a column of a file
    """

    task_name: ClassVar[str] = "probe"
    by_token: ClassVar[bool] = True

    labels: Literal["answer"] | LabelsFile | None = None

    def check(self, analysis: Analysis) -> None:
        """Raise SpecError if the run's data is not known or has no labels, or if the analysis needs too much memory."""
        run, outputs = analysis.run, 1
        if isinstance(self.labels, LabelsFile):
            self._labels(analysis)  # says what is wrong with the file
        elif not run.config:
            raise spec_error("task.run", f"{run.path} does not say which data it used", "run it again")
        else:
            info = run.data_info()
            if info.target is None:
                raise spec_error(
                    "task.run",
                    f"the data {info.name!r} of {run.path} has no targets to probe for",
                    "give a run on data that has labels, or task.labels={file: labels.csv, column: NAME}",
                )
            if self.labels is not None and info.tokenizer is None:
                raise spec_error(
                    "task.labels",
                    f"the samples of {info.name!r} are not of tokens: they have one target",
                    "leave it out",
                )
            # the number of classes, if it is known before the labels are read, or of the numbers to predict
            numbers = (
                math.prod(info.target.shape) if info.target.dtype.is_floating_point else info.num_classes
            )
            outputs = numbers or 1
        self._require_memory(analysis, outputs)

    def _require_memory(self, analysis: Analysis, outputs: int) -> int:
        return self.require_memory(analysis, "probing", partial(self._needed, analysis, outputs))

    def _needed(self, analysis: Analysis, outputs: int, project: int | None) -> dict[str, int]:
        """Module path -> the bytes needed while it is probed, including the weights of all probes."""
        from hookrun.tasks.analysis.probing import memory_needed

        every = self.features(analysis, project)
        kept = sum(4 * outputs * each.captured for each in every.values())
        return {name: memory_needed(each, outputs) + kept for name, each in every.items()}

    def measures(self, settings: Settings) -> dict[str, Direction | None]:
        """The scores of each probe: accuracies, or for numeric targets r2 under the same names."""
        return {f"{self.name}/accuracy": "maximize", f"{self.name}/train_accuracy": "maximize"}

    def analyse(self, analysis: Analysis, run_dir: RunDir, screen: Screen, results: Results) -> None:
        """Fit a probe for each module, log and show the scores, and write the weights.

        Raises SpecError if the labels need more memory than allowed.
        """
        import torch
        from safetensors.torch import save_file

        from hookrun.tasks.analysis.input import projection_entry, show_table
        from hookrun.tasks.analysis.probing import fit

        features, labels = self.features(analysis, self.project), self._labels(analysis)
        shown = list[list[str]]()
        every = [each.values for each in labels.values()]
        outputs = max(each[0].numel() if each.is_floating_point() else len(each.unique()) for each in every)
        self.say_memory(screen, self._require_memory(analysis, outputs))
        weights: dict[str, Tensor] = {}
        for module, rows in features.items():
            probed = results.get(module)
            if probed is None:
                capture = analysis.captures[module]
                numbered = torch.stack([capture.split_numbers, capture.sample_ids], dim=1)
                _, samples = numbered.unique(dim=0, return_inverse=True)
                line, of_probe = fit(rows, labels[module].values, samples, analysis.settings.seed)
                run_dir.log_metrics(split=self.name, module=module, **line, **projection_entry(rows))
                probed = {"line": line, "weights": of_probe}
                results.add(module, probed)
            line = probed["line"]
            train, test, majority, control = (
                f"{line[key]:.3f}" for key in ("train_accuracy", "accuracy", "majority", "control")
            )
            interval = (
                f"{line['accuracy_low']:.3f}–{line['accuracy_high']:.3f}" if "accuracy_low" in line else "–"
            )
            width = f"{rows.captured:,}" + ("" if rows.projection is None else f" → {rows.width:,}")
            shown.append([module, width, train, test, interval, majority, control])
            weights |= {f"{module}.{name}": tensor for name, tensor in probed["weights"].items()}
        show_table(screen.console, _HEADINGS, shown)
        self.say_projections(screen, features.values())
        names = next(iter(labels.values())).names
        save_file(weights, run_dir.path / PROBES, None if names is None else {"classes": json.dumps(names)})
        run_dir.wrote(run_dir.path / PROBES)

    def _labels(self, analysis: Analysis) -> dict[str, Labels]:
        """Module path -> the label of each row, read once for all modules with the same samples and positions."""
        from hookrun.tasks.analysis.probing import labels_of_data, labels_of_file

        read: dict[bytes, Labels] = {}
        labels: dict[str, Labels] = {}
        for module, capture in analysis.captures.items():
            columns = capture.split_numbers, capture.sample_ids, capture.positions
            rows = b"".join(column.numpy().tobytes() for column in columns)
            if rows not in read:
                read[rows] = (
                    labels_of_file(self.labels.file, self.labels.column, capture)
                    if isinstance(self.labels, LabelsFile)
                    else labels_of_data(analysis.run, capture, answer=self.labels == "answer")
                )
            labels[module] = read[rows]
        return labels
