"""Linear probes: logistic or ridge regression from features to labels; the labels of captured rows."""

from __future__ import annotations

import csv
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
    matrices = 3 * rows * features.width
    if features.width > fitted:
        matrices = rows**2 + 8 * fitted**2 + 2 * rows * fitted
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
    of_classes = not labels.is_floating_point()
    if of_classes:
        has_label = labels != IGNORED
    elif labels.dim() > 1:
        has_label = labels.flatten(1).isfinite().all(1)
    else:
        has_label = labels.isfinite()
    rows = has_label.nonzero().squeeze(1)
    y = labels.numpy()
    train, test = _parts(y[rows], samples[rows].numpy(), rows, seed, stratify=of_classes)
    seen = features.standardized(train)
    basis: Tensor | None = None
    if features.width > len(train):
        products = gram(seen, train)
        basis = _basis(products)
        x_train = products @ basis
        x_test = gram(seen, test, train) @ basis
    else:
        x_train = seen.whole(train)
        x_test = seen.whole(test)
    model: Any = RidgeCV(alphas=np.logspace(-3, 4, 8))
    dummy: Any = DummyRegressor()
    if of_classes:
        # A gradient of the same norm has larger elements if it has fewer of them.
        tolerance = _TOLERANCE * math.sqrt(max(features.width / x_train.shape[1], 1))
        model = LogisticRegression(max_iter=2000, tol=tolerance)
        dummy = DummyClassifier()
    fitted = _Rows(x_train.numpy(), y[train])
    scored = _Rows(x_test.numpy(), y[test])
    shuffled = np.random.default_rng(seed % 2**32).permutation
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The number of unique classes is greater than", UserWarning)
        control = clone(model).fit(fitted.x, shuffled(fitted.y)).score(scored.x, shuffled(scored.y))
        model.fit(*fitted)
    dummy.fit(*fitted)
    accuracy = float(model.score(*scored))
    line = {
        "score": "accuracy" if of_classes else "r2",
        "samples": len(samples[rows].unique()),
        "rows": len(rows),
        "features": features.captured,
        "accuracy": accuracy,
        "train_accuracy": float(model.score(*fitted)),
        "majority": float(dummy.score(*scored)),
        "control": float(control),
    }
    weights = _weights(model, seen, basis, train)
    if of_classes:
        low, high = wilson(accuracy, len(samples[test].unique()))
        line["accuracy_low"] = low
        line["accuracy_high"] = high
        weights["classes"] = torch.from_numpy(model.classes_).long()
    return line, weights


def _weights(model: Any, seen: Features, basis: Tensor | None, train: Tensor) -> dict[str, Tensor]:
    """Weight and bias for the captured features, which are neither standardized nor projected.

    seen:  the standardized features
    basis: in which the model has seen the rows `train`; None: it has seen the features
    """
    weight = torch.from_numpy(np.atleast_2d(model.coef_)).double()
    if basis is not None:
        weight = seen.weights(basis @ weight.T, train)
    assert seen.scale is not None
    assert seen.mean is not None
    weight = weight / seen.scale
    bias = torch.from_numpy(np.atleast_1d(model.intercept_)).double() - weight @ seen.mean
    return {"weight": seen.unprojected(weight).float().contiguous(), "bias": bias.float()}


class _Rows(NamedTuple):
    """Features and labels of some rows."""

    x: NDArray[Any]
    y: NDArray[Any]


def _parts(
    y: NDArray[Any], samples: NDArray[Any], rows: Tensor, seed: int, *, stratify: bool
) -> tuple[Tensor, Tensor]:
    """The rows of the training samples and of the test samples, in ascending order.

    All rows of a sample are in one part, as they are alike. With `stratify` both parts have the classes in the same
    proportion, by the first label of each sample, if each class has enough samples.
    """
    names, firsts, sample_of = np.unique(samples, return_index=True, return_inverse=True)
    needed = math.ceil(2 / TEST_SHARE)
    if len(names) < needed:
        raise HookrunError(
            f"a probe needs at least {needed} samples with a label, and there are {len(names)}"
        )
    classes = None
    if stratify:
        kinds, counts = np.unique(y[firsts], return_counts=True)
        if len(kinds) <= math.ceil(len(names) * TEST_SHARE) and counts.min() >= 2:
            classes = y[firsts]
    numbers = np.arange(len(names))
    of_train, _ = train_test_split(numbers, test_size=TEST_SHARE, random_state=seed % 2**32, stratify=classes)
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
    middle = share + square / 2
    half = math.sqrt(square * (share * (1 - share) + square / 4))
    low = (middle - half) / (1 + square)
    high = (middle + half) / (1 + square)
    return max(low, 0.0), min(high, 1.0)


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

    @property
    def outputs(self) -> int:
        """How many classes or targets there are."""
        if self.values.is_floating_point():
            return self.values[0].numel()
        return len(self.values.unique())


def labels_of_data(run: Run, capture: StoredCapture, *, answer: bool) -> Labels:
    """The target of each row: that of its sample, or for a row of one token that at its position.

    answer: of samples of tokens, the sample's last target for each of its rows. A row of a whole sequence has it too

    Raises SpecError if a sample has several labels.
    """
    values = run.labels_of(capture)
    of_tokens = run.data_info().tokenizer is not None
    if of_tokens and answer and values.dim() == 1:
        # Rows of tokens are in the order of the splits.
        splits = capture.split_numbers
        of_splits: list[Tensor] = []
        for split in splits.unique().tolist():
            of_splits.append(run.labels(capture.sample_ids[splits == split], SPLITS[split]))
        values = torch.cat(of_splits)
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
    records = list(table)
    header = list(table.fieldnames or ())
    if column not in header:
        raise spec_error(_COLUMN, f"{path} has no column {column!r}", nearest(column, header))
    for number, record in enumerate(records, 2):
        if None in record or None in record.values():
            raise spec_error(
                _FILE, f"{path}: record {number} does not have {len(header)} cells", "correct it"
            )
    keys = [key for key in _KEYS if key in header and key != column]
    if "sample" not in keys and "file" not in keys:
        _require_a_line_for_each_sample(path, len(records), capture)
        keys.append("sample")
        for number, record in enumerate(records):
            record["sample"] = str(number)
    label_of: dict[tuple[str, ...], str] = {}
    for record in records:
        cells = tuple(record[key].strip() for key in keys)
        label_of[cells] = record[column].strip()
    if len(label_of) < len(records):
        raise spec_error(
            _FILE, f"{path} has several lines for the same {', '.join(keys)}", "leave one of them"
        )
    rows = _row_keys(capture, keys)
    missing = list(dict.fromkeys(row for row in rows if row not in label_of))
    if missing:
        first = ", ".join(f"{key} {value}" for key, value in zip(keys, missing[0], strict=True))
        raise spec_error(
            _FILE,
            f"{path} has no line for {len(missing)} of {len(set(rows))}: the first is {first}",
            "add them; an empty cell leaves a row out",
        )
    return _parsed([label_of[row] for row in rows])


def _require_a_line_for_each_sample(path: Path, lines: int, capture: StoredCapture) -> None:
    """Raise SpecError unless the lines can be those of the samples of the capture, in their order."""
    splits = set(capture.splits)
    samples = set(zip(capture.splits, capture.sample_ids.tolist(), strict=True))
    if len(splits) != 1 or {sample for _, sample in samples} != set(range(lines)):
        raise spec_error(
            _FILE,
            f"{path} has {lines} lines and no column `sample` or `file`, and the capture has "
            f"{len(samples)} samples of {' and '.join(sorted(splits))}",
            "add a column `sample` (and `split`), as in samples.jsonl of the run",
        )


def _row_keys(capture: StoredCapture, keys: Sequence[str]) -> list[tuple[str, ...]]:
    """Of each row, its split, sample, file or position as a file of labels writes it."""
    columns = dict[str, Sequence[str]](
        split=capture.splits,
        sample=[str(sample) for sample in capture.sample_ids.tolist()],
        file=capture.files,
        position=[str(position) for position in capture.positions.tolist()],
    )
    return list(zip(*(columns[key] for key in keys), strict=True))


def _parsed(cells: Sequence[str]) -> Labels:
    """Whole numbers are classes, other numbers are targets, and texts are names of classes in alphabetical order."""
    texts = {cell for cell in cells if cell not in _NO_LABEL}
    try:
        number_of = {text: float(text) for text in texts}
    except ValueError:
        names = sorted(texts)
        class_of = {name: number for number, name in enumerate(names)}
        return Labels(torch.tensor([class_of.get(cell, IGNORED) for cell in cells]), names)
    if all(number.is_integer() for number in number_of.values()):
        return Labels(torch.tensor([int(number_of.get(cell, IGNORED)) for cell in cells]))
    return Labels(torch.tensor([number_of.get(cell, math.nan) for cell in cells]))
