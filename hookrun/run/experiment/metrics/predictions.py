"""The predictions of another run, with which metrics compare their own."""

from __future__ import annotations

from collections.abc import Mapping

from hookrun.data.info import SPLITS, Split
from hookrun.errors import HookrunError, listed
from hookrun.run.experiment.run_values import CaptureRows
from hookrun.store.captures.read import StoredCapture
from hookrun.store.reader import Run

_PATHS = ("logits", "[0]", "out")
"""The paths of the scores in an output with several tensors, in order of preference."""


def predicted_rows(run: Run, split: Split) -> CaptureRows:
    """The predictions of a run of task=predict for a split. HookrunError if there are none."""
    scores = _scores(run)
    is_of_split = (scores.split_numbers == SPLITS.index(split)) | (scores.split_numbers < 0)
    chosen = is_of_split.nonzero().squeeze(1)
    if not len(chosen):
        raise HookrunError(f"the run {run.path} predicted no sample of the split {split!r}")
    return CaptureRows(scores, f"predictions of the run {run.path}", chosen, resample=False)


def _scores(run: Run) -> StoredCapture:
    predictions = run.predictions
    if predictions is None:
        raise HookrunError(f"the run {run.path} has no predictions: name a run of task=predict")
    if isinstance(predictions, StoredCapture):
        return predictions
    for path in _PATHS:
        if isinstance(predictions, Mapping) and path in predictions:
            scores: StoredCapture = predictions[path]
            return scores
    inside = listed(list(predictions), 6)
    raise HookrunError(f"the predictions of the run {run.path} hold no scores, but {inside}")
