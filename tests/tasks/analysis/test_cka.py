"""CKA of all pairs of modules: both methods have the same results, and the cheapest that fits is chosen."""

from __future__ import annotations

import pytest
import torch
from draws import normal
from torch.testing import assert_close

from hookrun.tasks.analysis.cka import Way, chosen_way, linear_cka_of_all
from hookrun.tasks.analysis.features import Features


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
