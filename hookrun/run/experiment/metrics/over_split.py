"""Metrics over a whole split, by scikit-learn and SciPy, from the scores and targets of all rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from hookrun.errors import listed
from hookrun.run.experiment.metrics.rows import BatchRows, RowPart
from hookrun.store.objective import Average

OfColumn = Callable[[np.ndarray, np.ndarray], float]
NOT_DEFINED = math.nan


# ---- the rows that fit ----------------------------------------------------------------------------------------------


def class_scores(part: RowPart) -> Tensor | None:
    """The scores, if they are [n, classes] for labels [n], or one for each target."""
    if part.of_labels and part.scores.shape[1] > 1:
        return part.scores
    return value_scores(part) if part.scores.dim() < 3 else None


def are_classes(rows: BatchRows) -> bool:
    """Whether the targets are labels of the class scores, or 0 and 1 if there is a score for each."""
    scores, targets = rows.scores, rows.targets
    assert scores is not None  # else `class_scores` has refused them
    is_one_each = scores[0].numel() == targets[0].numel()
    classes = range(2 if is_one_each else scores.shape[1])
    return all(value in classes for value in targets.unique().tolist())


def one_class_scores(part: RowPart) -> Tensor | None:
    """As `class_scores`, of rows with one target."""
    return class_scores(part) if part.targets.numel() == len(part.targets) else None


def value_scores(part: RowPart) -> Tensor | None:
    """The scores, if there is one for each target."""
    return part.scores if part.scores.numel() == part.targets.numel() > 0 else None


@dataclass(frozen=True)
class SplitRows:
    """All rows of a pass in the order of the samples, on the CPU.

    scores:  [n, ...] float32 or float64; a list of n tensors if their shapes differ
    targets: [n, ...], or a list likewise
    notes:   what a metric has to say about them
    """

    scores: Any
    targets: Any
    notes: list[str] = field(default_factory=list)

    @cached_property
    def values(self) -> tuple[Tensor, Tensor]:
        """Scores and targets in float64, a column for each value of a row."""
        count = len(self.scores)
        return self.scores.reshape(count, -1).double(), self.targets.reshape(count, -1).double()

    @property
    def classes(self) -> int:
        """The number of classes; a single score is that of the class 1 of two."""
        return max(self.values[0].shape[1], 2)

    @property
    def several_labels(self) -> bool:
        """Whether a row has a target 0 or 1 for each class."""
        return self.values[1].shape[1] > 1

    @property
    def is_finite(self) -> bool:
        """Whether no score is NaN or infinite."""
        return bool(self.values[0].isfinite().all())

    def by_class(self, threshold: float = 0.0) -> tuple[Tensor, Tensor]:
        """Scores, and whether a row has a class, [n, classes]; a single score is taken relative to the threshold."""
        scores, targets = self.values
        if self.several_labels:
            return scores - threshold, targets == 1
        if self.classes == 2:
            above = scores - threshold
            if scores.shape[1] == 2:
                above = scores[:, 1:] - scores[:, :1]
            scores = torch.cat([-above, above], 1)
        return scores, targets == torch.arange(self.classes)

    def why_not(self) -> str:
        """Why a metric of these rows is not defined."""
        if not self.is_finite:
            return "scores are NaN or infinite"
        targets = listed(f"{value:g}" for value in self.values[1].unique().tolist())
        return f"all or none of the rows are of one class, or all values are equal; targets: {targets}"


# ---- the metrics ----------------------------------------------------------------------------------------------------


def ranked(function: str, rows: SplitRows, average: Average = "macro") -> list[float]:
    """A function of scikit-learn of how rows are ranked by their scores, of each class against the others."""
    from sklearn import metrics

    scores, truth = rows.by_class()
    if rows.classes > 2 and not rows.several_labels:
        sums = scores.sum(1)
        if bool((scores >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-2):
            rows.notes.append("the scores of each row add up to 1, and are taken as probabilities")
        else:
            scores = scores.softmax(1)
    elif average != "none" and not rows.several_labels:
        scores = scores[:, 1:]
        truth = truth[:, 1:]
    if average == "micro":
        scores = scores.reshape(-1, 1)
        truth = truth.reshape(-1, 1)
    values = _of_columns(getattr(metrics, function), scores, truth)
    return values if average == "none" else [float(np.mean(values))]


def decided(
    function: str, rows: SplitRows, average: Average = "macro", threshold: float = 0.0
) -> list[float]:
    """A function of scikit-learn of the predicted classes; a class for which it has no value does not count."""
    from sklearn import metrics

    scores, truth = rows.by_class(threshold)
    values, targets = rows.values
    is_one_each = values.shape == targets.shape
    if is_one_each and threshold == 0 and bool(((values >= 0) & (values <= 1)).all()):
        rows.notes.append(
            "all scores lie between 0 and 1, and those above 0 count as 1; for probabilities set threshold: 0.5"
        )
    predicted = scores > 0
    if not rows.several_labels:
        predicted = one_hot(scores.argmax(1), rows.classes)
    result = getattr(metrics, function)(
        truth.long().numpy(),
        predicted.long().numpy(),
        average=None if average == "none" else average,
        zero_division=np.nan,
    )
    return [float(value) for value in np.atleast_1d(result)]


def balanced_accuracy(rows: SplitRows, threshold: float = 0.0) -> list[float]:
    """The mean over the classes of the fraction of a class's rows that are right."""
    return decided("recall_score", rows, threshold=threshold)


def r2(rows: SplitRows) -> list[float]:
    """The coefficient of determination, the mean over the values of a row."""
    from sklearn.metrics import r2_score

    return [float(np.mean(_of_columns(r2_score, *rows.values)))]


def spearman(rows: SplitRows) -> list[float]:
    """Spearman's rank correlation, the mean over the values of a row."""
    from scipy.stats import spearmanr

    def correlation(truth: np.ndarray, scores: np.ndarray) -> float:
        is_constant = scores.min() == scores.max()
        return NOT_DEFINED if is_constant else float(spearmanr(truth, scores).statistic)

    return [float(np.mean(_of_columns(correlation, *rows.values)))]


def _of_columns(function: OfColumn, scores: Tensor, truth: Tensor) -> list[float]:
    """function(truth, scores) of each column; not defined where the truth is all equal."""
    values: list[float] = []
    for column, column_scores in zip(truth.numpy().T, scores.numpy().T, strict=True):
        is_constant = column.min() == column.max()
        values.append(NOT_DEFINED if is_constant else float(function(column, column_scores)))
    return values


def in_order(parts: Sequence[Tensor], order: Tensor) -> Tensor | list[Tensor]:
    """The rows of all parts in this order; a list if their shapes differ."""
    if len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(list(parts))[order]
    rows: list[Tensor] = []
    for part in parts:
        rows += part
    return [rows[place] for place in order.tolist()]
