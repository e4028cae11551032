"""A linear probe: logistic or ridge regression from features to labels, from as few numbers as give the exact one."""

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
from hookrun.tasks.loop.features import BYTES, Features, gram
from hookrun.tasks.loop.memory import reading_bytes

TEST_SHARE = 0.25
_TOLERANCE = 1e-6
"""Of the gradient's largest element, where a logistic regression on all features ends."""
_HISTORY = 24
"""Copies of the weights and their gradients that the optimizer keeps."""


@dataclass(frozen=True)
class Probed:
    """How a probe did on samples that it was fitted on and on others.

    score:    `accuracy` for classes, `r2` for numbers
    features: the numbers in a row of the capture
    chance:   what the most frequent class, or the mean, gets on the test samples
    weights:  `weight` [classes or targets, features], `bias`, both for features as they are
    """

    score: str
    features: int
    train: float
    test: float
    chance: float
    weights: dict[str, Tensor]


def memory_needed(features: Features, outputs: int) -> int:
    """Bytes that `fit` takes at most, for so many classes or targets.

    Of more features than samples the work is done with a number for each sample.
    """
    rows = len(features)
    fitted = rows - math.ceil(rows * TEST_SHARE)
    numbers = min(features.width, fitted)
    by_samples = rows**2 + 8 * fitted**2 + 2 * rows * fitted
    matrices = by_samples if features.width > fitted else 3 * rows * features.width
    solver = outputs * (_HISTORY * numbers + 4 * fitted)
    weights = 3 * outputs * features.captured + 4 * features.width
    return reading_bytes([features]) + BYTES * (matrices + solver + weights)


def fit(features: Features, labels: Tensor, seed: int) -> Probed:
    """Fit on three quarters of the samples, judge on the rest.

    labels: [samples] of integers, for logistic regression; of floats, [samples] or [samples, targets], for ridge
            regression

    Where there are more features than samples, the standardized rows are first turned into the basis that they span,
    which changes neither lengths nor angles: the regression on them is the same one, with fewer numbers.

    Raises HookrunError where there are too few samples to judge on.
    """
    classes = not labels.is_floating_point()
    needed = math.ceil(max(len(labels.unique()) if classes else 1, 2) / TEST_SHARE)
    if len(labels) < needed:
        kinds = f" for {len(labels.unique())} classes" if classes else ""
        raise HookrunError(f"a probe needs at least {needed} samples{kinds}, {len(labels)} were captured")
    y = labels.numpy()
    train, test = _parts(y, classes, seed)
    seen = features.standardized(train)
    basis: Tensor | None = None
    if features.width > len(train):
        products = gram(seen, torch.arange(len(y)))[:, train]
        basis = _basis(products[train])
        x_train, x_test = products[train] @ basis, products[test] @ basis
    else:
        x_train, x_test = seen.whole(train), seen.whole(test)
    # A gradient of the same length has larger elements where it has fewer of them.
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
    return Probed(
        score="accuracy" if classes else "r2",
        features=features.captured,
        train=float(model.score(*parts[0])),
        test=float(model.score(*parts[1])),
        chance=float(dummy.score(*parts[1])),
        weights=_for_features_as_they_are(seen, weight, np.atleast_1d(model.intercept_)),
    )


def _parts(y: Any, classes: bool, seed: int) -> tuple[Tensor, Tensor]:
    """The positions of the training and of the test samples, both in ascending order."""
    # A class of one sample can't be on both sides.
    stratified = classes and np.unique(y, return_counts=True)[1].min() >= 2
    train, test = train_test_split(
        np.arange(len(y)), test_size=TEST_SHARE, random_state=seed % 2**32, stratify=y if stratified else None
    )
    return torch.from_numpy(np.sort(train)), torch.from_numpy(np.sort(test))


def _basis(products: Tensor) -> Tensor:
    """[n, r]: inner products with n rows, times this, are coordinates in an orthonormal basis of their span.

    products: [n, n] of the rows with each other
    """
    values, vectors = torch.linalg.eigh(products)
    kept = values > values.amax().clamp_min(0) * len(products) * torch.finfo(torch.float64).eps
    kept[-1] = (
        True  # of features that do not vary nothing is left, and a regression takes at least one number
    )
    found: Tensor = vectors[:, kept] / values[kept].sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    return found if values[-1] > 0 else torch.zeros_like(found)


def _for_features_as_they_are(features: Features, weight: Tensor, intercept: Any) -> dict[str, Tensor]:
    """The linear map of features that are neither standardized nor projected."""
    assert features.scale is not None and features.mean is not None
    plain = weight / features.scale
    bias = torch.from_numpy(intercept).double() - plain @ features.mean
    return {"weight": features.unprojected(plain).float().contiguous(), "bias": bias.float()}
