"""Rows of a capture as vectors: read in blocks, centered, standardized, projected; the memory that they need."""

from __future__ import annotations

import pytest
import torch
from draws import normal
from torch.testing import assert_close

from hookrun.errors import HookrunError
from hookrun.tasks.analysis.features import SUGGESTED, Features, Projection, gram, reading_bytes, too_large


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
