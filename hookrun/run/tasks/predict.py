"""task=predict: runs a split through the model in order; predictions and captures are stored by sample."""

from __future__ import annotations

from typing import ClassVar

from hookrun.run.tasks.evaluate import EvaluateTask


class PredictTask(EvaluateTask):
    """Writes the model's outputs to predictions/; otherwise as task=evaluate.

    metrics:  the metrics to compute, the loss only if it is listed; null: none
    tokens:   for sequences: the positions at which metrics are computed; null: all with a token to predict
    max_rows: for metrics over the whole split: how many samples or tokens are kept at most
    """

    task_name: ClassVar[str] = "predict"
    scores: ClassVar[bool] = False
    writes_rows: ClassVar[bool] = True
