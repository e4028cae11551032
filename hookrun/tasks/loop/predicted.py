"""The predictions of another run, by sample: `{name: kl, against: {run: ...}}`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hookrun.data.info import SPLITS, Split
from hookrun.errors import HookrunError, listed
from hookrun.run_values import FoundRuns
from hookrun.run_values.sources import RunRows
from hookrun.store.captures import StoredCapture
from hookrun.store.reader import Run

_PATHS = ("logits", "[0]", "out")
"""The paths of the scores in an output with several tensors, in order of preference."""


class Predicted:
    """The predictions of a run of task=predict.

    capture: [rows, ...], a row for each sample
    named:   the path of the run, for messages
    """

    def __init__(self, capture: StoredCapture, named: str) -> None:
        self._capture, self._named = capture, named
        self._rows = dict[Split, RunRows]()

    @classmethod
    def of(cls, runs: FoundRuns, name: str) -> Predicted | None:
        """The predictions of the run; None if it has not been run yet. HookrunError if it has no predictions."""
        run = runs.open(name)
        return None if run is None else cls(_scores(run), str(run.path))

    def rows(self, split: Split) -> RunRows:
        """The rows of a split. HookrunError if there are none."""
        if split not in self._rows:
            splits = self._capture.splits
            part = ((splits == SPLITS.index(split)) | (splits < 0)).nonzero().squeeze(1)
            if not len(part):
                raise HookrunError(f"the run {self._named} predicted no sample of the split {split!r}")
            self._rows[split] = RunRows(
                self._capture, f"predictions of the run {self._named}", part, resample=False
            )
        return self._rows[split]

    def scores(self, ids: Tensor, split: Split) -> Tensor:
        """[B, ...] on the CPU: the predictions for these samples. HookrunError if a sample has none."""
        return self.rows(split).of(ids, _UNUSED)


_UNUSED = torch.Generator()
"""An argument of `RunRows.of` that is not used, since no samples are drawn."""


def _scores(run: Run) -> StoredCapture:
    found = run.predictions
    if found is None:
        raise HookrunError(f"the run {run.path} has no predictions: name a run of task=predict")
    if isinstance(found, StoredCapture):
        return found
    if isinstance(found, Mapping) and (path := next((each for each in _PATHS if each in found), None)):
        return found[path]
    raise HookrunError(f"the predictions of the run {run.path} hold no scores, but {listed(list(found), 6)}")
