"""The linear probe of features: its score, its weights, and the samples that it needs."""

from __future__ import annotations

import pytest
import torch
from draws import normal
from torch import Tensor
from torch.testing import assert_close

import hookrun
from hookrun.tasks.analysis.features import Features
from hookrun.tasks.analysis.linear_probe import ProbeResult, fit


def probe(features: Tensor, labels: Tensor, seed: int) -> ProbeResult:
    return fit(Features("features", features, block_bytes=2**26), labels, seed)


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
