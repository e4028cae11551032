"""Exact linear CKA of every pair of captured modules in bounded memory, from features or from samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hookrun.errors import HookrunError
from hookrun.run.passes.resuming import Results
from hookrun.run.tasks.captured.features import BYTES, Features, gram, reading_bytes
from hookrun.store.captures.read import StoredCapture

PRODUCTS, TILES = "products", "tiles"
"""Names of results: the inner products of all pairs of modules; the finished rows of tiles and their sums."""

_FEWEST = 16
"""The smallest tile, in samples: smaller tiles would need too many passes over the captures."""


@dataclass(frozen=True)
class Way:
    """How the inner products are computed.

    by_features: from covariances between all features, in one pass; otherwise from inner products between samples
    tile:        the number of samples in a tile: `tile` x `tile` inner products are computed at once
    needed:      memory in bytes
    """

    by_features: bool
    tile: int
    needed: int


def chosen_way(features: Sequence[Features], allowed: int) -> Way:
    """The way with the fewest operations that fits into `allowed` bytes; if none fits, that with the least memory."""
    rows = len(features[0])
    modules = len(features)
    width = sum(each.width for each in features)
    least = reading_bytes(features) + BYTES * width
    # A block of rows of all modules is there twice: the modules' own tensors and the concatenated one.
    blocks = 2 * _rows_at_once(features) * BYTES * width
    covariances = Way(True, rows, blocks + least + BYTES * width**2)
    room = math.isqrt(max(allowed - least, 0) // (BYTES * (modules + 1)))
    tile = min(rows, max(room, _FEWEST))
    products = Way(False, tile, least + BYTES * (modules + 1) * tile**2)
    costs = {covariances: rows * width**2, products: rows**2 * (width + modules**2)}
    fitting = [way for way in costs if way.needed <= allowed]
    if fitting:
        return min(fitting, key=costs.__getitem__)
    return min(costs, key=lambda way: way.needed)


def _rows_at_once(features: Sequence[Features]) -> int:
    """The number of rows of all modules together that fit into one block."""
    return max(1, features[0].block_bytes // (BYTES * max(sum(each.width for each in features), 1)))


def linear_cka_of_all(features: Sequence[Features], way: Way, results: Results | None = None) -> Tensor:
    """[modules, modules] from 0 to 1: linear centered kernel alignment of each pair; all have rows of the same samples.

    ||Yᵀ X||² / (||Xᵀ X|| ||Yᵀ Y||) with centered columns and Frobenius norms, or the same from the inner products
    between samples: <X Xᵀ, Y Yᵀ> = ||Yᵀ X||². Kornblith, Norouzi, Lee, Hinton: Similarity of Neural Network
    Representations Revisited (2019).

    results: intermediate results, from which an interrupted analysis continues
    """
    results = results if results is not None else Results()
    products: Tensor | None = results.get(PRODUCTS)
    if products is None:
        every = torch.arange(len(features[0]))
        centered = [each.centered(every) for each in features]
        products = _by_features(centered) if way.by_features else _by_samples(centered, way.tile, results)
        results.add(PRODUCTS, products)
    norms = products.diagonal().sqrt()
    below = norms[:, None] * norms
    return torch.where(below > 0, products / below, 0.0).clamp(0, 1)  # 0 for features that do not vary


def linear_cka(rows: StoredCapture, other: StoredCapture, max_bytes: int) -> float | None:
    """Linear CKA of two captures; None for rows that are not of samples or not finite, and if it needs more memory."""
    features = [Features.within(max_bytes, "", each) for each in (rows, other)]
    way = chosen_way(features, max_bytes)
    if len(rows) < 2 or not rows.is_by_sample or way.needed > max_bytes:
        return None
    try:
        return float(linear_cka_of_all(features, way)[0, 1])
    except HookrunError:  # values that are not finite
        return None


def _by_features(features: Sequence[Features]) -> Tensor:
    widths = [each.width for each in features]
    covariance = torch.zeros(sum(widths), sum(widths), dtype=torch.float64)
    every = torch.arange(len(features[0]))
    for rows in every.split(_rows_at_once(features)):
        beside = torch.cat([each.whole(rows) for each in features], dim=1)
        covariance.addmm_(beside.T, beside)
    blocks = [part.split(widths, dim=1) for part in covariance.split(widths)]
    rows_of_norms = [torch.stack(list(map(torch.linalg.vector_norm, row))) for row in blocks]
    return torch.stack(rows_of_norms).square()


def _by_samples(features: Sequence[Features], tile: int, results: Results) -> Tensor:
    parts = torch.arange(len(features[0])).split(tile)
    products = torch.zeros(len(features), len(features), dtype=torch.float64)
    begin, products = results.get(TILES) or (0, products)
    for number, rows in enumerate(parts[begin:], begin):
        for others in parts[number:]:
            on_diagonal = others is rows
            found = torch.empty(len(features), len(rows), len(others), dtype=torch.float64)
            for place, each in enumerate(features):
                found[place] = gram(each, rows, None if on_diagonal else others)
            flat = found.flatten(1)
            # Each tile off the diagonal counts for its transpose too.
            products.addmm_(flat, flat.T, alpha=1 if on_diagonal else 2)
        results.add(TILES, (number + 1, products.clone()), is_whole=False)
    return products
