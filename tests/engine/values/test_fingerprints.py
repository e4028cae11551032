"""Fingerprints of rows: their norms, their differences, and equal bits for equal rows."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hookrun
from hookrun.engine.values.fingerprints import ERROR, difference, fingerprints

SIGNS = [-1.0, -1.0, -1.0, 1.0, -1.0, 1.0]
"""Of the elements of a row of six."""
SHAPES = [(10,), (768,), (64, 768), (17, 251), (12, 40, 40), (66, 66), (5000,), (520, 520)]


def changes(shape: tuple[int, ...], generator: torch.Generator) -> Iterator[Tensor]:
    """Differences of two rows: spread, of one channel, token or element, of a block, diagonal, smooth, of rank one."""

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=generator))

    yield normal(*shape)
    yield normal(math.prod(shape)).cumsum(0).view(shape)
    for dim, size in enumerate(shape):
        for width in (1, 1 + size // 12):
            part = torch.zeros(shape)
            part.narrow(dim, below(size - width + 1), width).copy_(normal(*part.narrow(dim, 0, width).shape))
            yield part
        yield normal(size).view([-1 if each == dim else 1 for each in range(len(shape))]).expand(shape)
    if len(shape) > 1 and shape[-1] == shape[-2]:
        part = torch.zeros(shape)
        part.diagonal(0, -2, -1).copy_(normal(*part.diagonal(0, -2, -1).shape))
        yield part
    some = torch.zeros(shape)
    some.view(-1)[below(some.numel() - 8) :][:8] = 1
    yield some


def test_the_norm_of_a_difference_is_known_within_25_percent() -> None:
    generator = torch.Generator().manual_seed(0)
    errors = []
    for shape in SHAPES:
        for change in [each for _ in range(6) for each in changes(shape, generator)]:
            row = torch.randn(shape, generator=generator)
            first, second = (fingerprints(each.double().unsqueeze(0), 64) for each in (row, row + change))
            true = np.linalg.norm((row + change).double().numpy() - row.double().numpy())
            found = difference(first, second)
            errors.append(abs(float(found.distance) / true - 1))
            assert float(found.relative) == pytest.approx(
                float(found.distance) / np.linalg.norm(row.numpy()), 1e-5
            )
    assert np.quantile(errors, 0.95) < ERROR
    assert np.mean(errors) < 0.1


@pytest.mark.parametrize("shape", [(9, 768), (5, 64, 768), (3, 300_000), (40,)], ids=str)
def test_equal_rows_have_equal_bits_in_any_batch(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    whole = fingerprints(x, 64)
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            alone = torch.cat([fingerprints(row.unsqueeze(0), 64) for row in x])
            strided = torch.stack([x, x], -1)[..., 0]
            for found in (
                fingerprints(x, 64),
                alone,
                fingerprints(strided, 64),
                fingerprints(x.flip(0), 64).flip(0),
            ):
                assert torch.equal(found, whole)
    finally:
        torch.set_num_threads(before)
    assert not any(each.any() for each in difference(whole, whole.clone()))


def test_norm_and_largest_element_are_those_of_the_row() -> None:
    x = torch.randn(4, 33, 50, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e5m2,
        torch.complex64,
    ):
        given = x.to(dtype)
        found = fingerprints(given, 6)
        flat = given.to(torch.complex128 if dtype.is_complex else torch.float64).flatten(1)
        assert found.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
        torch.testing.assert_close(
            found[:, 6].double(), torch.linalg.vector_norm(flat, dim=1), rtol=1e-6, atol=0
        )
        assert torch.equal(found[:, 7].double(), flat.abs().amax(1))


def test_directions_depend_on_the_shape_of_a_row_only() -> None:
    # written down once: another machine, version or process gives the same signs
    one = fingerprints(torch.eye(6), 4)[:, :4]
    buckets = [0, 1, 2, 3, 0, 1]  # 11 of them, of which the last are added to the first
    signs = torch.tensor(SIGNS)
    assert torch.equal(one, torch.eye(4)[buckets] * signs.unsqueeze(1))
    assert torch.equal(fingerprints(2 * torch.eye(6, dtype=torch.float64), 4)[:, :4], 2 * one.double())
    other = fingerprints(torch.eye(6).view(6, 2, 3), 4)[:, :4]
    assert not torch.equal(other, one)


def test_nan_and_infinity_are_visible_and_equal_themselves() -> None:
    rows = torch.ones(3, 70)
    rows[1, 5] = math.nan
    rows[2, 7] = -math.inf
    found = fingerprints(rows, 64)
    assert found[1, 64:].isnan().all() and found[2, 64:].isinf().all()
    assert not difference(found, found).relative.any()
    assert not difference(found, fingerprints(torch.ones(3, 70), 64)).relative[1:].isfinite().any()
    assert fingerprints(torch.ones(0, 3), 2).shape == (0, 4)
    assert not fingerprints(torch.ones(2, 0), 2).any()


def test_a_change_of_one_weight_is_seen_in_each_of_100_models() -> None:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 16))
    spec = {"print": {"select": "**", "hook": "forward", "action": "capture", "reduce": {"fingerprint": 64}}}
    x = torch.randn(7, 24, generator=generator)
    with torch.no_grad(), hookrun.hooked(model, spec) as hooks:
        kept = hooks.captures["print"]
        model(x)
        for _ in range(100):
            layer = model[0] if torch.rand((), generator=generator) < 0.5 else model[2]
            place = int(torch.randint(layer.weight.numel(), (1,), generator=generator))
            old = layer.weight.view(-1)[place].item()
            layer.weight.view(-1)[place] += 1e-3
            model(x)
            layer.weight.view(-1)[place] = old
            model(x)
            path = "0" if layer is model[0] else "2"
            assert difference(kept[path][0], kept[path][-2]).relative.all()
            assert torch.equal(kept["0"][0], kept["0"][-2]) == (path == "2")
            assert torch.equal(kept[path][0], kept[path][-1])
