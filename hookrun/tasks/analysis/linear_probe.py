"""A linear probe: logistic or ridge regression from features to labels, with at most one coordinate for each sample."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import train_test_split
from torch import Tensor

from hookrun.data.samples import IGNORED
from hookrun.errors import HookrunError
from hookrun.tasks.analysis.features import BYTES, Features, gram, reading_bytes

TEST_SHARE = 0.25
_TOLERANCE = 1e-6
"""Logistic regression on all features stops when the gradient's largest element is below this."""
_HISTORY = 24
"""The number of copies of the weights and gradients that the optimizer keeps."""


def memory_needed(features: Features, outputs: int) -> int:
    """The largest memory of `fit` in bytes, with `outputs` classes or targets.

    With more features than samples, the regression uses one coordinate for each sample.
    """
    rows = len(features)
    fitted = rows - math.ceil(rows * TEST_SHARE)
    numbers = min(features.width, fitted)
    by_samples = rows**2 + 8 * fitted**2 + 2 * rows * fitted
    matrices = by_samples if features.width > fitted else 3 * rows * features.width
    solver = outputs * (_HISTORY * numbers + 4 * fitted)
    weights = 3 * outputs * features.captured + 4 * features.width
    return reading_bytes([features]) + BYTES * (matrices + solver + weights)


def fit(
    features: Features, labels: Tensor, samples: Tensor, seed: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fit a probe on the rows of three quarters of the samples and score it on the rows of the others.

    labels:  integers [rows] for logistic regression; floats [rows] or [rows, targets] for ridge regression. Rows with
             the label IGNORED or NaN are left out
    samples: [rows] int64, equal for the rows of one sample
    seed:    of the split into training and test samples, and of the shuffled labels

    If there are more features than samples, the standardized rows are first written in an orthonormal basis of their
    span. This keeps lengths and angles, so the regression is the same, with fewer features.

    Returns the numbers of its line of metrics:

    score:    the metric: `accuracy` for classes, `r2` for numbers
    samples, rows: how many have a label
    features: the number of features in a row of the capture
    accuracy, train_accuracy: the score on the samples that were held out, and on those on which the probe was fitted
    majority: the score on the held-out samples of always predicting the most frequent class, or the mean
    control:  the score on the held-out samples of a probe whose labels are shuffled, in both parts
    accuracy_low, accuracy_high: of an accuracy, Wilson's 95 % interval for the number of held-out samples

    and the probe: `weight` [classes or targets, features] and `bias`, for features that are not standardized; of
    classes `classes` [classes] int64, their labels.

    Raises HookrunError if there are too few samples or classes to score the probe.
    """
    classes = not labels.is_floating_point()
    has_label = labels != IGNORED if classes else labels.reshape(len(labels), -1).isfinite().all(1)
    rows, y = has_label.nonzero().squeeze(1), labels.numpy()
    train, test = _parts(y[rows], samples[rows].numpy(), rows, seed, stratify=classes)
    seen = features.standardized(train)
    basis: Tensor | None = None
    if features.width > len(train):
        products = gram(seen, train)
        basis = _basis(products)
        x_train, x_test = products @ basis, gram(seen, test, train) @ basis
    else:
        x_train, x_test = seen.whole(train), seen.whole(test)
    # A gradient of the same norm has larger elements if it has fewer of them.
    tolerance = _TOLERANCE * math.sqrt(max(features.width / x_train.shape[1], 1))
    model: Any = (
        LogisticRegression(max_iter=2000, tol=tolerance) if classes else RidgeCV(alphas=np.logspace(-3, 4, 8))
    )
    parts = (x_train.numpy(), y[train]), (x_test.numpy(), y[test])
    shuffled = np.random.default_rng(seed % 2**32).permutation
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The number of unique classes is greater than", UserWarning)
        control = clone(model).fit(parts[0][0], shuffled(y[train])).score(parts[1][0], shuffled(y[test]))
        model.fit(*parts[0])
    accuracy = float(model.score(*parts[1]))
    dummy = (DummyClassifier() if classes else DummyRegressor()).fit(*parts[0])
    weight = torch.from_numpy(np.atleast_2d(model.coef_)).double()
    if basis is not None:
        weight = seen.weights(basis @ weight.T, train)
    # Weight and bias for the captured features, which are neither standardized nor projected.
    assert seen.scale is not None and seen.mean is not None
    weight = weight / seen.scale
    bias = torch.from_numpy(np.atleast_1d(model.intercept_)).double() - weight @ seen.mean
    line = {
        "score": "accuracy" if classes else "r2",
        "samples": len(samples[rows].unique()),
        "rows": len(rows),
        "features": features.captured,
        "accuracy": accuracy,
        "train_accuracy": float(model.score(*parts[0])),
        "majority": float(dummy.score(*parts[1])),
        "control": float(control),
    }
    weights = {"weight": seen.unprojected(weight).float().contiguous(), "bias": bias.float()}
    if classes:
        line["accuracy_low"], line["accuracy_high"] = wilson(accuracy, len(samples[test].unique()))
        weights["classes"] = torch.from_numpy(model.classes_).long()
    return line, weights


def _parts(
    y: NDArray[Any], samples: NDArray[Any], rows: Tensor, seed: int, *, stratify: bool
) -> tuple[Tensor, Tensor]:
    """The rows of the training samples and of the test samples, in ascending order.

    All rows of a sample are in one part, as they are alike. With `stratify` both parts have the classes in the same
    proportion, by the first label of each sample, if each class has enough samples.
    """
    names, firsts, sample_of = np.unique(samples, return_index=True, return_inverse=True)
    kinds, counts = np.unique(y[firsts] if stratify else firsts, return_counts=True)
    needed = math.ceil(2 / TEST_SHARE)
    if len(names) < needed:
        raise HookrunError(
            f"a probe needs at least {needed} samples with a label, and there are {len(names)}"
        )
    enough = len(kinds) <= math.ceil(len(names) * TEST_SHARE) and counts.min() >= 2
    by_class = y[firsts] if stratify and enough else None
    of_train, _ = train_test_split(
        np.arange(len(names)), test_size=TEST_SHARE, random_state=seed % 2**32, stratify=by_class
    )
    in_train = np.isin(sample_of, of_train)
    if stratify and len(np.unique(y[in_train])) < 2:
        raise HookrunError(
            f"a probe needs two classes, and the rows to fit it have only {y[in_train][0]}: name other labels, or "
            "capture more samples"
        )
    return rows[in_train], rows[~in_train]


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of `count` independent samples: E. B. Wilson (1927)."""
    square = 1.959964**2 / count
    middle, half = share + square / 2, math.sqrt(square * (share * (1 - share) + square / 4))
    return max((middle - half) / (1 + square), 0.0), min((middle + half) / (1 + square), 1.0)


def _basis(products: Tensor) -> Tensor:
    """[n, r]: the matrix from inner products with n rows to coordinates in an orthonormal basis of the rows' span.

    products: [n, n], the inner products of the rows with each other
    """
    values, vectors = torch.linalg.eigh(products)
    kept = values > values.amax().clamp_min(0) * len(products) * torch.finfo(torch.float64).eps
    kept[-1] = True  # a regression needs at least one feature, even if no feature varies
    found: Tensor = vectors[:, kept] / values[kept].sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    return found if values[-1] > 0 else torch.zeros_like(found)
