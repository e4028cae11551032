"""Rows of a capture as vectors in bounded memory; the CKA of all pairs of modules; linear probes of features."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from draws import normal
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch.testing import assert_close

import hookrun
from hookrun.errors import HookrunError
from hookrun.tasks.analysis.cka import Way, chosen_way, linear_cka_of_all
from hookrun.tasks.analysis.features import SUGGESTED, Features, Projection, gram, reading_bytes, too_large
from hookrun.tasks.analysis.linear_probe import ProbeResult, fit, memory_needed


def linear_cka(x: torch.Tensor, y: torch.Tensor) -> float:
    features = [Features(name, rows, block_bytes=2**26) for name, rows in (("x", x), ("y", y))]
    return float(linear_cka_of_all(features, chosen_way(features, 2**31))[0, 1])


def probe(features: torch.Tensor, labels: torch.Tensor, seed: int) -> ProbeResult:
    rows = Features("features", features, block_bytes=2**26)
    return fit(rows, labels, torch.arange(len(labels)), seed)


def test_blocks_have_the_requested_rows_for_any_block_size_and_dtype() -> None:
    real = normal(20, 2, 3)
    rows = torch.tensor([0, 1, 2, 7, 11, 12, 19])
    for capture in (real, torch.complex(real, -real), real.bfloat16()):
        flat = torch.view_as_real(capture).flatten(1) if capture.is_complex() else capture.flatten(1)
        for block_bytes in (1, 8 * 6 * 4, 2**20):
            features = Features("x", capture, block_bytes=block_bytes)
            assert features.width == features.captured == flat.shape[1]
            assert torch.equal(features.whole(rows), flat[rows].double()), (capture.dtype, block_bytes)
            lengths = [len(values) for _, values in features.blocks(rows)]
            assert max(lengths) <= features.rows_at_once and sum(lengths) == len(rows)


def test_standardized_features_have_mean_0_and_variance_1_and_constant_ones_are_0() -> None:
    x = normal(40, 3) * torch.tensor([1.0, 1e6, 1e-6]) + 7
    x = torch.cat([x, torch.full((40, 1), 0.1)], dim=1)
    rows = torch.arange(0, 40, 2)
    found = Features("x", x, block_bytes=100).standardized(rows).whole(rows)
    assert_close(found.mean(0), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-8)
    assert_close(found[:, :3].var(0, correction=0), torch.ones(3, dtype=torch.float64))
    assert found[:, 3].tolist() == [0] * 20


def test_rows_that_are_not_finite_are_counted() -> None:
    x = normal(6, 4)
    x[2, 1], x[4, 0] = torch.nan, torch.inf
    with pytest.raises(HookrunError, match="layer: 2 of 6 rows hold values that are not finite"):
        Features("layer", x, block_bytes=1).centered(torch.arange(6))


def test_a_projection_is_linear_and_its_weights_can_be_mapped_back() -> None:
    x, rows = normal(10, 500), torch.arange(10)
    features = Features("x", x, block_bytes=2**12, projection=Projection(64, seed=1))
    projected, weights = features.whole(rows), normal(3, 64).double()
    assert features.width == 64 and features.captured == 500
    assert_close(x.double() @ features.unprojected(weights).T, projected @ weights.T)
    assert not torch.equal(Features("x", x, 1, Projection(64, seed=2)).whole(rows), projected)
    norms = projected.square().sum(1) / x.double().square().sum(1)
    assert 0.5 < float(norms.mean()) < 1.5, "inner products are kept in expectation"


def test_inner_products_do_not_depend_on_the_blocks() -> None:
    x, rows, others = normal(9, 5), torch.arange(9), torch.tensor([1, 4, 5])
    features = Features("x", x, block_bytes=8 * 5 * 2)
    assert_close(gram(features, rows), x.double() @ x.double().T)
    assert_close(gram(features, rows, others), x.double() @ x[others].double().T)


def test_four_blocks_of_the_widest_module_and_a_sketch_are_needed() -> None:
    narrow, wide = (Features("x", torch.empty(10, width), block_bytes=1000) for width in (5, 1000))
    assert reading_bytes([narrow]) == 4 * 25 * 5 * 8, "25 rows of 40 bytes in a block"
    assert reading_bytes([narrow, wide]) == 4 * 1 * 1000 * 8, "at least one row"
    projected = Features("x", torch.empty(10, 1000), block_bytes=1000, projection=Projection(8, seed=0))
    assert reading_bytes([projected]) == reading_bytes([wide]) + 2 * 8 * 1000


def test_a_projection_is_suggested_only_where_it_would_fit() -> None:
    features = Features("fc", torch.empty(2000, 8, 1024), block_bytes=1)
    tried = list[int]()

    def needs(result: int) -> str:
        return str(too_large("probing", features, 150_000_001, 10**6, lambda to: tried.append(to) or result))

    found = needs(10**6)
    assert "task.max_bytes" in found and "fc has 2,000 rows of [8, 1024]" in found
    assert "task.max_bytes=200000000" in found and f"task.project={SUGGESTED}" in found
    assert "task.project" not in needs(10**6 + 1) and set(tried) == {SUGGESTED}
    narrow = Features("fc", torch.empty(2000, SUGGESTED), block_bytes=1)
    assert "task.project" not in str(too_large("probing", narrow, 10**8, 1, lambda to: 0))


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


def test_a_probe_of_more_features_than_samples_equals_that_of_all_features() -> None:
    x, labels = normal(80, 300).double() * torch.linspace(0.1, 9, 300) + 3, torch.arange(80) % 3
    x[:, 7] = 5  # constant
    for y in (labels, x[:, :4].sum(1)):
        found = fit(Features("x", x, block_bytes=8 * 300 * 7), y, torch.arange(80), seed=4)
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
    found = fit(features, labels, torch.arange(60), seed=0)
    assert found.features == 30 and found.weights["weight"].shape == (1, 30)
    plain = fit(
        Features("x", features.whole(torch.arange(60)), block_bytes=2**16), labels, torch.arange(60), seed=0
    )
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
    assert found.test > 0.9 > 0.7 > found.majority
    noise = probe(normal(400, 5, seed=1), labels, seed=0)
    assert noise.test == pytest.approx(noise.majority, abs=0.15)


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
    assert found.majority < 0.05
    assert_close(x @ found.weights["weight"].T + found.weights["bias"], y, rtol=0.05, atol=0.1)


def test_a_class_of_one_sample_does_not_stop_a_probe() -> None:
    labels = torch.tensor([0] * 20 + [1] * 20 + [2])
    assert 0 <= probe(normal(41, 3), labels, seed=0).test <= 1


def test_too_few_samples_are_an_error() -> None:
    with pytest.raises(hookrun.HookrunError, match="at least 8 samples with a label, and there are 7"):
        probe(normal(30, 3), torch.tensor([0] * 7 + [-100] * 23), seed=0)
