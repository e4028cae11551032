"""Linear CKA of representations of the same samples: the formula of the paper, by the cheaper method that fits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from draws import normal
from torch.testing import assert_close

from hookrun.tasks.analysis.cka import Way, chosen_way, linear_cka_of_all
from hookrun.tasks.analysis.features import Features


def linear_cka(x: torch.Tensor, y: torch.Tensor) -> float:
    features = [Features(name, rows, block_bytes=2**26) for name, rows in (("x", x), ("y", y))]
    return float(linear_cka_of_all(features, chosen_way(features, 2**31))[0, 1])


def test_cka_is_the_same_by_features_and_by_samples_in_tiles() -> None:
    tensors = [normal(50, width, seed=width) for width in (3, 20, 90)]
    features = [Features(str(x.shape[1]), x, block_bytes=8 * 90 * 7) for x in tensors]
    whole = linear_cka_of_all(features, Way(by_features=True, tile=50, needed=0))
    for tile in (50, 16):
        assert_close(linear_cka_of_all(features, Way(by_features=False, tile=tile, needed=0)), whole)
    x, y = (each - each.mean(0) for each in tensors[1:])
    expected = (y.T @ x).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm())
    assert float(whole[1, 2]) == pytest.approx(float(expected), rel=1e-5)


def test_the_method_depends_on_the_allowed_memory() -> None:
    narrow = [Features(name, normal(1000, 4), block_bytes=2**12) for name in "ab"]
    assert chosen_way(narrow, 2**30).by_features
    wide = [Features(name, torch.empty(50, 10_000), block_bytes=2**12) for name in "ab"]
    roomy, tight, hopeless = (chosen_way(wide, allowed) for allowed in (2**30, 2**19, 1))
    assert (roomy.by_features, roomy.tile) == (False, 50)
    assert not tight.by_features and tight.tile < 50
    assert not hopeless.by_features and hopeless.tile == 16 and hopeless.needed > 1
    assert roomy.needed > tight.needed >= hopeless.needed


@pytest.mark.parametrize("width", [3, 50], ids=["fewer features than samples", "more"])
def test_cka_is_one_for_rotated_and_scaled_features_and_small_for_unrelated_ones(width: int) -> None:
    x = normal(30, width)
    rotation = torch.linalg.qr(normal(width, width, seed=1)).Q
    assert linear_cka(x, x) == pytest.approx(1)
    assert linear_cka(x, 3 * x @ rotation + 7) == pytest.approx(1, abs=1e-5)
    other = normal(2000, 3, seed=2)
    assert linear_cka(normal(2000, 3), other) < 0.05
    assert linear_cka(x, torch.ones(30, 2)) == 0


def test_cka_is_the_formula_of_the_paper() -> None:
    x, y = normal(12, 4).numpy(), normal(12, 20, seed=1).numpy()
    center = np.eye(12) - 1 / 12
    k, l = center @ x @ x.T @ center, center @ y @ y.T @ center  # noqa: E741
    expected = np.trace(k @ l) / np.sqrt(np.trace(k @ k) * np.trace(l @ l))
    assert linear_cka(torch.from_numpy(x), torch.from_numpy(y)) == pytest.approx(expected, rel=1e-5)
