"""The linear CKA of two representations of the same samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from draws import normal

from hookrun.tasks.analysis.cka import chosen_way, linear_cka_of_all
from hookrun.tasks.analysis.features import Features


@pytest.mark.parametrize("width", [3, 50], ids=["fewer features than samples", "more"])
def test_cka_is_one_for_rotated_and_scaled_features_and_small_for_unrelated_ones(width: int) -> None:
    x = normal(30, width)
    rotation = torch.linalg.qr(normal(width, width, seed=1)).Q
    assert linear_cka(x, x) == pytest.approx(1)
    assert linear_cka(x, 3 * x @ rotation + 7) == pytest.approx(1, abs=1e-5)
    other = normal(2000, 3, seed=2)
    assert linear_cka(normal(2000, 3), other) < 0.05
    assert linear_cka(x, torch.ones(30, 2)) == 0


def linear_cka(x: torch.Tensor, y: torch.Tensor) -> float:
    features = [Features(name, rows, block_bytes=2**26) for name, rows in (("x", x), ("y", y))]
    return float(linear_cka_of_all(features, chosen_way(features, 2**31))[0, 1])


def test_cka_is_the_formula_of_the_paper() -> None:
    x, y = normal(12, 4).numpy(), normal(12, 20, seed=1).numpy()
    center = np.eye(12) - 1 / 12
    k, l = center @ x @ x.T @ center, center @ y @ y.T @ center  # noqa: E741
    expected = np.trace(k @ l) / np.sqrt(np.trace(k @ k) * np.trace(l @ l))
    assert linear_cka(torch.from_numpy(x), torch.from_numpy(y)) == pytest.approx(expected, rel=1e-5)
