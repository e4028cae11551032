"""task=probe: how well a linear model predicts the label of each row from each layer's activations.

task=similarity: how similar the layers' representations of the same samples are, by linear CKA.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hookrun.engine.validation import Section
from hookrun.errors import HookrunError, counted, spec_error
from hookrun.studies.captures.records import PROBES
from hookrun.studies.kit.tasks import Direction, Settings, TaskOfCaptures

if TYPE_CHECKING:
    from torch import Tensor

    from hookrun.studies.captures.probing import Labels
    from hookrun.studies.kit.files import RunDir, StoredCapture
    from hookrun.studies.kit.passes import Analysis, Features, Results, Screen, Way
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
        run = analysis.run
        outputs = 1
        if isinstance(self.labels, LabelsFile):
            self._labels(analysis)  # says what is wrong with the file
        elif self.rows is not None:
            raise spec_error(
                "task.labels",
                f"the files of {run.path} have no labels to probe for",
                "name a file with a line for each sample: task.labels={file: labels.csv, column: NAME}",
            )
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
            if info.target.dtype.is_floating_point:
                outputs = math.prod(info.target.shape) or 1
            else:
                outputs = info.num_classes or 1
        self._require_memory(analysis, outputs)

    def _require_memory(self, analysis: Analysis, outputs: int) -> int:
        return self.require_memory(analysis, "probing", partial(self._needed, analysis, outputs))

    def _needed(self, analysis: Analysis, outputs: int, project: int | None) -> dict[str, int]:
        """Module path -> the bytes needed while it is probed, including the weights of all probes."""
        from hookrun.studies.captures.probing import memory_needed

        features = self.features(analysis, project)
        kept = sum(4 * outputs * rows.captured for rows in features.values())
        return {name: memory_needed(rows, outputs) + kept for name, rows in features.items()}

    def measures(self, settings: Settings) -> dict[str, Direction | None]:
        """The scores of each probe: accuracies, or for numeric targets r2 under the same names."""
        return {f"{self.name}/accuracy": "maximize", f"{self.name}/train_accuracy": "maximize"}

    def analyse(self, analysis: Analysis, run_dir: RunDir, screen: Screen, results: Results) -> None:
        """Fit a probe for each module, log and show the scores, and write the weights.

        Raises SpecError if the labels need more memory than allowed.
        """
        import torch
        from safetensors.torch import save_file

        from hookrun.studies.captures.probing import fit
        from hookrun.studies.kit.passes import projection_entry, show_table

        features = self.features(analysis, self.project)
        labels = self._labels(analysis)
        shown: list[list[str]] = []
        outputs = max(each.outputs for each in labels.values())
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
            shown.append([module, *_shown(line, rows)])
            for name, tensor in probed["weights"].items():
                weights[f"{module}.{name}"] = tensor
        show_table(screen.console, _HEADINGS, shown)
        self.say_projections(screen, features.values())
        names = next(iter(labels.values())).names
        save_file(weights, run_dir.path / PROBES, None if names is None else {"classes": json.dumps(names)})
        run_dir.wrote(run_dir.path / PROBES)

    def _labels(self, analysis: Analysis) -> dict[str, Labels]:
        """Module path -> the label of each row, read once for all modules with the same samples and positions."""
        from hookrun.studies.captures.probing import labels_of_data, labels_of_file

        read: dict[bytes, Labels] = {}
        labels: dict[str, Labels] = {}
        for module, capture in analysis.captures.items():
            columns = [capture.split_numbers, capture.sample_ids, capture.positions]
            rows = b"".join(column.numpy().tobytes() for column in columns)
            if rows not in read and isinstance(self.labels, LabelsFile):
                read[rows] = labels_of_file(self.labels.file, self.labels.column, capture)
            elif rows not in read:
                read[rows] = labels_of_data(analysis.run, capture, answer=self.labels == "answer")
            labels[module] = read[rows]
        return labels


def _shown(line: Mapping[str, Any], rows: Features) -> list[str]:
    """The texts of a probe below `_HEADINGS`."""
    width = f"{rows.captured:,}"
    if rows.projection is not None:
        width += f" → {rows.width:,}"
    interval = "–"
    if "accuracy_low" in line:
        interval = f"{line['accuracy_low']:.3f}–{line['accuracy_high']:.3f}"
    train = f"{line['train_accuracy']:.3f}"
    test = f"{line['accuracy']:.3f}"
    return [width, train, test, interval, f"{line['majority']:.3f}", f"{line['control']:.3f}"]


FEWEST_ROWS = 3
"""Two rows lie on one line in any space: centered, each module has the same products between them."""


class SimilarityTask(TaskOfCaptures):
    """Compares each captured module with each other one."""

    task_name: ClassVar[str] = "similarity"

    def check(self, analysis: Analysis) -> None:
        """Raise SpecError if there are too few modules or rows, or if the analysis needs too much memory."""
        if len(analysis.captures) < 2:
            raise spec_error(
                "task.capture",
                f"only {', '.join(analysis.captures)} was captured: there is nothing to compare it with",
                "capture several modules",
            )
        if (rows := min(len(each.sample_ids) for each in analysis.captures.values())) < FEWEST_ROWS:
            raise spec_error(
                "task.run",
                f"only {counted(rows, 'row')} captured: any CKA is then 1 or 0",
                f"capture at least {FEWEST_ROWS} samples",
            )
        self.require_memory(analysis, "comparing the modules", partial(self._needed, analysis))

    def _needed(self, analysis: Analysis, project: int | None) -> dict[str, int]:
        """The widest module -> the bytes needed to compare all modules."""
        widest = max(self.features(analysis, None).values(), key=lambda each: each.captured)
        return {widest.name: self._way(analysis, project).needed}

    def _way(self, analysis: Analysis, project: int | None) -> Way:
        from hookrun.studies.kit.passes import chosen_way

        return chosen_way(list(self.features(analysis, project).values()), self.max_bytes)

    def measures(self, settings: Settings) -> dict[str, Direction | None]:
        """The CKA of two different modules, from 0 to 1."""
        return {f"{self.name}/cka": "maximize"}

    def analyse(self, analysis: Analysis, run_dir: RunDir, screen: Screen, results: Results) -> None:
        """Log and show the matrix. Raises HookrunError if the modules were captured on different samples."""
        from hookrun.studies.kit.passes import linear_cka_of_all, projection_entry, show_table

        first, *others = analysis.captures.values()
        if not all(_has_same_samples(first, other) for other in others):
            raise HookrunError("the modules were captured on different samples: capture them in one run")
        features = self.features(analysis, self.project)
        way = self._way(analysis, self.project)
        self.say_memory(screen, way.needed)
        matrix = linear_cka_of_all(list(features.values()), way, results).tolist()
        shown: list[list[str]] = []
        for number, (name, values) in enumerate(zip(features, matrix, strict=True)):
            shown.append([name, str(number), *(f"{value:.3f}" for value in values)])
            for other, value in zip(features, values, strict=True):
                how = projection_entry(features[name]) or projection_entry(features[other])
                run_dir.log_metrics(split=self.name, module=name, other=other, cka=value, **how)
        show_table(screen.console, ["linear CKA", "", *map(str, range(len(features)))], shown)
        self.say_projections(screen, features.values())


def _has_same_samples(capture: StoredCapture, other: StoredCapture) -> bool:
    """Whether the rows of both captures are of the same samples, in the same order."""
    is_same_split = capture.split_numbers.tolist() == other.split_numbers.tolist()
    return is_same_split and capture.sample_ids.tolist() == other.sample_ids.tolist()
