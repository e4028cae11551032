"""Linear probes: logistic or ridge regression from features to labels; the labels of captured rows."""

from __future__ import annotations

import csv
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import train_test_split
from torch import Tensor

from hookrun.errors import HookrunError, nearest, spec_error
from hookrun.studies.kit.files import Run, StoredCapture
from hookrun.studies.kit.passes import (
    BYTES,
    IGNORED,
    SPLITS,
    Features,
    checked_file,
    gram,
    lines,
    reading_bytes,
)

TEST_SHARE = 0.25
_TOLERANCE = 1e-6
"""Logistic regression on all features stops when the gradient's largest element is below this."""
_HISTORY = 24
"""The number of copies of the weights and gradients that the optimizer keeps."""

_FILE, _COLUMN = "task.labels.file", "task.labels.column"
_NO_LABEL = ("", str(IGNORED))
_KEYS = ("split", "sample", "file", "position")
"""The columns of a file of labels that say whose label a line has."""


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
    of_train, _ = train_test_split(
        np.arange(len(names)),
        test_size=TEST_SHARE,
        random_state=seed % 2**32,
        stratify=y[firsts] if stratify and enough else None,
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


# ---- labels ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Labels:
    """The labels of the rows of a capture.

    values: [rows] int64, IGNORED where a row has none; of numeric targets floats [rows] or [rows, targets]
    names:  the name of each class; None: a class is its number
    """

    values: Tensor
    names: Sequence[str] | None = None


def labels_of_data(run: Run, capture: StoredCapture, *, answer: bool) -> Labels:
    """The target of each row: that of its sample, or for a row of one token that at its position.

    answer: of samples of tokens, the sample's last target for each of its rows. A row of a whole sequence has it too

    Raises SpecError if a sample has several labels.
    """
    values = run.labels_of(capture)
    of_tokens = run.data_info().tokenizer is not None
    if of_tokens and answer and values.dim() == 1:
        # Rows of tokens are in the order of the splits.
        ids, splits = capture.sample_ids, capture.split_numbers
        values = torch.cat([run.labels(ids[splits == part], SPLITS[part]) for part in splits.unique()])
    if of_tokens and values.dim() == 2:
        last = (values != IGNORED).long().mul(torch.arange(1, values.shape[1] + 1)).argmax(1, keepdim=True)
        values = values.gather(1, last).squeeze(1)
    if not values.is_floating_point() and values.dim() > 1:
        raise spec_error(
            "task.labels",
            f"each sample of the data has {list(values.shape[1:])} labels, and a probe predicts one for each row",
            "name a file: task.labels={file: labels.csv, column: NAME}",
        )
    return Labels(values)


def labels_of_file(name: str, column: str, capture: StoredCapture) -> Labels:
    """The label of each row from a column of a CSV file with a header; an empty cell or -100 means none.

    A line is for the rows that agree with its columns `sample` (and `split`, `position`) or `file`. Without these
    columns line n is of sample n, if the file has as many lines as the capture has samples of its one split.

    Raises SpecError if the file cannot be read, or a row is not in it.
    """
    path, _ = checked_file(name, None, _FILE, (".csv",))
    table = csv.DictReader(text for _, text in lines(path, _FILE))
    records, header = list(table), list(table.fieldnames or ())
    if column not in header:
        raise spec_error(_COLUMN, f"{path} has no column {column!r}", nearest(column, header))
    for number, record in enumerate(records, 2):
        if None in record or None in record.values():
            raise spec_error(
                _FILE, f"{path}: record {number} does not have {len(header)} cells", "correct it"
            )
    keys = [key for key in _KEYS if key in header and key != column]
    if not {"sample", "file"} & set(keys):
        samples = set(_row_keys(capture, ["split", "sample"]))
        in_order = {(split, str(number)) for split, _ in samples for number in range(len(records))}
        if samples != in_order or len(samples) > len(records):
            raise spec_error(
                _FILE,
                f"{path} has {len(records)} lines and no column `sample` or `file`, and the capture has "
                f"{len(samples)} samples of {' and '.join(sorted({split for split, _ in samples}))}",
                "add a column `sample` (and `split`), as in samples.jsonl of the run",
            )
        keys.append("sample")
        records = [{**record, "sample": str(number)} for number, record in enumerate(records)]
    rows = _row_keys(capture, keys)
    cells_of = {tuple(record[key].strip() for key in keys): record[column].strip() for record in records}
    if len(cells_of) < len(records):
        raise spec_error(
            _FILE, f"{path} has several lines for the same {', '.join(keys)}", "leave one of them"
        )
    missing = list(dict.fromkeys(row for row in rows if row not in cells_of))
    if missing:
        first = ", ".join(f"{key} {value}" for key, value in zip(keys, missing[0], strict=True))
        raise spec_error(
            _FILE,
            f"{path} has no line for {len(missing)} of {len(set(rows))}: the first is {first}",
            "add them; an empty cell leaves a row out",
        )
    return _parsed([cells_of[row] for row in rows])


def _row_keys(capture: StoredCapture, keys: Sequence[str]) -> list[tuple[str, ...]]:
    """Of each row, its split, sample, file or position as a file of labels writes it."""
    columns = {
        "split": capture.splits,
        "sample": [*map(str, capture.sample_ids.tolist())],
        "file": capture.files,
        "position": [*map(str, capture.positions.tolist())],
    }
    return list(zip(*(columns[key] for key in keys), strict=True))


def _parsed(cells: Sequence[str]) -> Labels:
    """Whole numbers are classes, other numbers are targets, and texts are names of classes in alphabetical order."""
    given = {cell for cell in cells if cell not in _NO_LABEL}
    try:
        number_of = {cell: float(cell) for cell in given}
    except ValueError:
        names = sorted(given)
        number_of = {name: number for number, name in enumerate(names)}
        return Labels(torch.tensor([number_of.get(cell, IGNORED) for cell in cells]), names)
    if all(number.is_integer() for number in number_of.values()):
        return Labels(torch.tensor([int(number_of.get(cell, IGNORED)) for cell in cells]))
    return Labels(torch.tensor([number_of.get(cell, float("nan")) for cell in cells]))
