"""The linear probe of features: its score, weights and memory, with fewer or more features than samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from draws import normal
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch.testing import assert_close

import hookrun
from hookrun.tasks.analysis.features import Features, Projection
from hookrun.tasks.analysis.linear_probe import ProbeResult, fit, memory_needed


def probe(features: Tensor, labels: Tensor, seed: int) -> ProbeResult:
    return fit(Features("features", features, block_bytes=2**26), labels, seed)


def test_a_probe_of_more_features_than_samples_equals_that_of_all_features() -> None:
    x, labels = normal(80, 300).double() * torch.linspace(0.1, 9, 300) + 3, torch.arange(80) % 3
    x[:, 7] = 5  # constant
    for y in (labels, x[:, :4].sum(1)):
        found = fit(Features("x", x, block_bytes=8 * 300 * 7), y, seed=4)
        parts = train_test_split(x.numpy(), y.numpy(), test_size=0.25, random_state=4,
                                 stratify=y.numpy() if y is labels else None)  # fmt: skip
        model = (
            LogisticRegression(max_iter=9000, tol=1e-8)
            if y is labels
            else RidgeCV(alphas=np.logspace(-3, 4, 8))
        )
        theirs = make_pipeline(StandardScaler(), model).fit(parts[0], parts[2])
        assert found.test == pytest.approx(theirs.score(parts[1], parts[3]), abs=1e-3)
        weight = np.atleast_2d(theirs[1].coef_) / theirs[0].scale_
        assert_close(found.weights["weight"].numpy(), weight.astype(np.float32), rtol=1e-3, atol=1e-5)


def test_weights_of_projected_features_are_for_the_captured_ones() -> None:
    x = normal(60, 30)
    labels = (x[:, 0] > 0).long()
    features = Features("x", x, block_bytes=2**16, projection=Projection(8, seed=3))
    found = fit(features, labels, seed=0)
    assert found.features == 30 and found.weights["weight"].shape == (1, 30)
    plain = fit(Features("x", features.whole(torch.arange(60)), block_bytes=2**16), labels, seed=0)
    scores = x @ found.weights["weight"].T + found.weights["bias"]
    rows = features.whole(torch.arange(60)).float()
    assert_close(scores, rows @ plain.weights["weight"].T + plain.weights["bias"], rtol=1e-3, atol=1e-4)


def test_more_features_than_samples_need_memory_by_samples() -> None:
    narrow, wide, wider = (
        memory_needed(Features("x", torch.empty(100, width), block_bytes=1), outputs=2)
        for width in (75, 10_000, 20_000)
    )
    assert narrow < wide < wider
    assert wide < 8 * 3 * 100 * 10_000, "the matrix of all features is not made"


def test_a_probe_finds_a_linear_boundary_and_nothing_in_noise() -> None:
    x = normal(400, 5)
    labels = (x[:, 0] * 100 + x[:, 1] * 50 > 7).long()
    found = probe(x * torch.tensor([1, 100, 1, 1, 1.0]) + 3, labels, seed=0)
    assert found.score == "accuracy"
    assert found.test > 0.9 > 0.7 > found.chance
    noise = probe(normal(400, 5, seed=1), labels, seed=0)
    assert noise.test == pytest.approx(noise.chance, abs=0.15)


def test_weights_of_a_probe_apply_to_the_captured_features() -> None:
    x = normal(300, 4) * torch.tensor([0.1, 1, 10, 100.0]) + 5
    labels = (x[:, 3] > 50).long()
    found = probe(x, labels, seed=0)
    scores = x @ found.weights["weight"].T + found.weights["bias"]
    assert scores.shape == (300, 1)  # for two classes: positive for the second
    assert ((scores[:, 0] > 0) == labels).float().mean() > 0.95


def test_numbers_are_predicted_by_regression() -> None:
    x = normal(200, 6)
    y = x @ normal(6, 2, seed=1) + 4
    found = probe(x, y, seed=0)
    assert (found.score, found.weights["weight"].shape) == ("r2", (2, 6))
    assert found.test > 0.99
    assert found.chance < 0.05
    assert_close(x @ found.weights["weight"].T + found.weights["bias"], y, rtol=0.05, atol=0.1)


def test_a_class_of_one_sample_does_not_stop_a_probe() -> None:
    labels = torch.tensor([0] * 20 + [1] * 20 + [2])
    assert 0 <= probe(normal(41, 3), labels, seed=0).test <= 1


def test_too_few_samples_are_an_error() -> None:
    with pytest.raises(hookrun.HookrunError, match="at least 40 samples for 10 classes, 30 were captured"):
        probe(normal(30, 3), torch.arange(10).repeat(3), seed=0)
