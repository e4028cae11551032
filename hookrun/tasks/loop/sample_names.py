"""What the samples of a pass are called: a line of samples.jsonl for each, as it goes through the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hookrun.data import Split
from hookrun.store.run_dir import RunDir
from hookrun.tasks.loop.batches import Batch, Batches


class SampleNames:
    """Writes the file and the class of each sample, and the class that the model predicts.

    A class is written where the target is a label, a predicted one where the output is a number for each class.
    """

    def __init__(self, run_dir: RunDir, parts: Mapping[Split, Batches], num_classes: int | None) -> None:
        self._run_dir = run_dir
        self._data = {split: batches.data for split, batches in parts.items()}
        self._num_classes = num_classes

    def write(self, batch: Batch, output: Any) -> None:
        """Write the samples of a batch; `output` is what the model gave for it."""
        samples = self._data[batch.split]
        labels = _labels(batch.target)
        predicted = self._predicted(output, len(batch.ids)) if labels is not None else None
        for row, number in enumerate(batch.ids.tolist()):
            line: dict[str, Any] = {"split": batch.split, "sample": number, "file": samples.file(number)}
            if labels is not None:
                line["class"] = samples.class_name(labels[row])
            if predicted is not None:
                line["predicted_class"] = samples.class_name(predicted[row])
            self._run_dir.log_sample(line)

    def _predicted(self, output: Any, count: int) -> list[int] | None:
        """The largest of each row of scores [count, classes]; None where the output is something else."""
        if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != count:
            return None
        if not output.is_floating_point() or output.shape[1] < 2:
            return None
        if self._num_classes is not None and output.shape[1] < self._num_classes:
            return None
        found: list[int] = output.detach().argmax(1).tolist()
        return found


def _labels(target: Tensor) -> list[int] | None:
    """The labels of a batch; None where the target is not a label."""
    if target.dim() != 1 or target.is_floating_point() or target.is_complex():
        return None
    found: list[int] = target.tolist()
    return found
