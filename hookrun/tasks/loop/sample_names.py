"""What the samples of a pass are called: a line of samples.jsonl for each, as it goes through the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hookrun.data import Split
from hookrun.data.samples import IGNORED
from hookrun.runtime.tokens.calls import EMBEDS, IDS, MASK
from hookrun.store.run_dir import RunDir
from hookrun.tasks.loop.batches import Batch, Batches

MOST_TOKENS = 2**18
"""Of a split, whose tokens are written: those of its first samples."""


class SampleNames:
    """Writes the file and the class of each sample, and the class that the model predicts.

    A class is written where the target is a label, a predicted one where the output is a number for each class; of
    the first sequences of tokens the tokens and their targets, with which pictures name their axes.

    log_texts: called with the tokens that were written; None: their texts are not kept
    """

    def __init__(
        self,
        run_dir: RunDir,
        parts: Mapping[Split, Batches],
        num_classes: int | None,
        log_texts: Callable[[list[int]], None] | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._log_texts = log_texts
        self._data = {split: batches.data for split, batches in parts.items()}
        self._num_classes = num_classes

    def write(self, batch: Batch, output: Any) -> None:
        """Write the samples of a batch; `output` is what the model gave for it."""
        samples = self._data[batch.split]
        labels = _labels(batch.target)
        predicted = self._predicted(output, len(batch.ids)) if labels is not None else None
        tokens = self._tokens(batch)
        for row, number in enumerate(batch.ids.tolist()):
            line: dict[str, Any] = {"split": batch.split, "sample": number, "file": samples.file(number)}
            if labels is not None:
                line["class"] = samples.class_name(labels[row])
            if predicted is not None:
                line["predicted_class"] = samples.class_name(predicted[row])
            self._run_dir.log_sample({**line, **tokens.get(row, {})})

    def _tokens(self, batch: Batch) -> dict[int, dict[str, Any]]:
        """Row -> the tokens of the sample without their padding, and the target of each; None: it has none.

        Which samples are meant follows from their numbers alone, so that a run that was cut off writes the same.
        """
        inputs = batch.inputs
        if not batch.data.of_tokens or not isinstance(inputs, dict) or EMBEDS in inputs:
            return {}
        ids, mask = inputs.get(IDS), inputs.get(MASK)
        if ids is None or ids.dim() != 2 or ids.shape[1] == 0:
            return {}
        rows = (batch.ids < MOST_TOKENS // ids.shape[1]).nonzero().squeeze(1).tolist()
        if not rows:
            return {}
        ids = ids.cpu()
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.cpu() != 0
        targets = batch.target.cpu() if batch.target.shape == ids.shape else None
        found = dict[int, dict[str, Any]]()
        for row in rows:
            columns = real[row].nonzero().squeeze(1)
            if not len(columns):
                continue
            first, end = int(columns[0]), int(columns[-1]) + 1
            found[row] = {"tokens": ids[row, first:end].tolist(), "padding": [first, ids.shape[1] - end]}
            if targets is not None:
                of_each = targets[row, first:end].tolist()
                found[row]["targets"] = [None if each == IGNORED else each for each in of_each]
        if self._log_texts is not None:
            kept = [ids[row][real[row]] for row in rows]
            if targets is not None:
                kept += [targets[row][targets[row] != IGNORED] for row in rows]
            self._log_texts(torch.cat(kept).tolist())
        return found

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
