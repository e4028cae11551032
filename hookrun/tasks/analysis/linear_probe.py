"""A linear probe: logistic or ridge regression from features to labels, with at most one coordinate for each sample."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import train_test_split
from torch import Tensor

from hookrun.errors import HookrunError
from hookrun.tasks.analysis.features import BYTES, Features, gram, reading_bytes

TEST_SHARE = 0.25
_TOLERANCE = 1e-6
"""Logistic regression on all features stops when the gradient's largest element is below this."""
_HISTORY = 24
"""The number of copies of the weights and gradients that the optimizer keeps."""


@dataclass(frozen=True)
class ProbeResult:
    """The result of a probe.

    score:    the metric: `accuracy` for classes, `r2` for numbers
    features: the number of features in a row of the capture
    train:    the score on the samples on which the probe was fitted
    test:     the score on the other samples
    chance:   the score on the test samples of always predicting the most frequent class, or the mean
    weights:  `weight` [classes or targets, features] and `bias`, for features that are not standardized
    """

    score: str
    features: int
    train: float
    test: float
    chance: float
    weights: dict[str, Tensor]


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


def fit(features: Features, labels: Tensor, seed: int) -> ProbeResult:
    """Fit a probe on three quarters of the samples and score it on the rest.

    labels: integers [samples] for logistic regression; floats [samples] or [samples, targets] for ridge regression
    seed:   of the split into training and test samples

    If there are more features than samples, the standardized rows are first written in an orthonormal basis of their
    span. This keeps lengths and angles, so the regression is the same, with fewer features.

    Raises HookrunError if there are too few samples to score the probe.
    """
    classes = not labels.is_floating_point()
    needed = math.ceil(max(len(labels.unique()) if classes else 1, 2) / TEST_SHARE)
    if len(labels) < needed:
        kinds = f" for {len(labels.unique())} classes" if classes else ""
        raise HookrunError(f"a probe needs at least {needed} samples{kinds}, {len(labels)} were captured")
    y = labels.numpy()
    # A class with one sample cannot be in both parts.
    stratified = classes and np.unique(y, return_counts=True)[1].min() >= 2
    parted = train_test_split(
        np.arange(len(y)), test_size=TEST_SHARE, random_state=seed % 2**32, stratify=y if stratified else None
    )
    train, test = (torch.from_numpy(np.sort(rows)) for rows in parted)
    seen = features.standardized(train)
    basis: Tensor | None = None
    if features.width > len(train):
        products = gram(seen, torch.arange(len(y)))[:, train]
        basis = _basis(products[train])
        x_train, x_test = products[train] @ basis, products[test] @ basis
    else:
        x_train, x_test = seen.whole(train), seen.whole(test)
    # A gradient of the same norm has larger elements if it has fewer of them.
    tolerance = _TOLERANCE * math.sqrt(max(features.width / x_train.shape[1], 1))
    model: Any = (
        LogisticRegression(max_iter=2000, tol=tolerance) if classes else RidgeCV(alphas=np.logspace(-3, 4, 8))
    )
    parts = (x_train.numpy(), y[train]), (x_test.numpy(), y[test])
    model.fit(*parts[0])
    dummy = (DummyClassifier() if classes else DummyRegressor()).fit(*parts[0])
    weight = torch.from_numpy(np.atleast_2d(model.coef_)).double()
    if basis is not None:
        weight = seen.weights(basis @ weight.T, train)
    # Weight and bias for the captured features, which are neither standardized nor projected.
    assert seen.scale is not None and seen.mean is not None
    weight = weight / seen.scale
    bias = torch.from_numpy(np.atleast_1d(model.intercept_)).double() - weight @ seen.mean
    return ProbeResult(
        score="accuracy" if classes else "r2",
        features=features.captured,
        train=float(model.score(*parts[0])),
        test=float(model.score(*parts[1])),
        chance=float(dummy.score(*parts[1])),
        weights={"weight": seen.unprojected(weight).float().contiguous(), "bias": bias.float()},
    )


def _basis(products: Tensor) -> Tensor:
    """[n, r]: the matrix from inner products with n rows to coordinates in an orthonormal basis of the rows' span.

    products: [n, n], the inner products of the rows with each other
    """
    values, vectors = torch.linalg.eigh(products)
    kept = values > values.amax().clamp_min(0) * len(products) * torch.finfo(torch.float64).eps
    kept[-1] = True  # a regression needs at least one feature, even if no feature varies
    found: Tensor = vectors[:, kept] / values[kept].sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    return found if values[-1] > 0 else torch.zeros_like(found)
