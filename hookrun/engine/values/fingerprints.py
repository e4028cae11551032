"""Fingerprints: a few numbers for each row of a tensor, by which two runs are compared without the rows themselves.

A row is added up, with random signs, in p buckets: element i in bucket i mod p, as in the count sketch of Charikar,
Chen and Farach-Colton. p is a prime that divides no size of the row, so that a token, a channel, a head and any other
regular part of the row is spread over the buckets. Then each bucket is added, with random signs, to one projection of
each of four groups, as in the sparse embedding (OSNAP) of Nelson and Nguyen.

Each step adds tensors element by element, in an order that depends on the shape of a row only. Therefore equal rows
have equal fingerprints, bit for bit, in any batch and with any number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import shake_128
from math import gcd, isqrt, prod, sqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake, unset_fake_temporarily
from torch.nn.functional import avg_pool2d

from hookrun.engine.values.tensors import as_real, ordinary_tensors, widened

ERROR = 0.25
"""With 64 projections, of 100 estimated norms 95 are within this share of the true ones; with k, sqrt(64 / k) of it."""

_STEP = 2**17  # elements of a row that are added at once
_AT_ONCE = 2**19  # elements of several rows that are added at once: they stay in the cache of a processor
_SIGNS = 2**18  # signs that are stored; in longer rows each step begins at a random one
_NORM_OF = 256  # elements of which a norm is taken at once
_NORM_OF_ON_GPU = 32  # there more are added in an order that depends on the number of rows


class Difference(NamedTuple):
    """What two fingerprints say of the difference of their rows, each [rows].

    distance: its estimated L2 norm; 0 if the fingerprints are equal; NaN or infinite if they have NaN or infinity
    relative: that, divided by the norm of the first row; 0 if the fingerprints are equal
    """

    distance: Tensor
    relative: Tensor


def fingerprints(x: Tensor, count: int) -> Tensor:
    """x [rows, ...] -> [rows, count + 2]: random projections, the L2 norm and the largest absolute value of each row.

    The projections have the norm of the row in expectation; their directions depend on the row's shape and `count`
    only. All is computed in float32, of float64 in float64. A complex number counts as two, its real and imaginary
    part. NaN and infinity in a row make its numbers NaN or infinite; elements above 1e19 of a float32 row its norm.
    """
    real, _ = as_real(widened(x))
    rows = real.flatten(1) if real.dim() > 1 else real.unsqueeze(-1)
    dtype = torch.promote_types(rows.dtype, torch.float32)
    if is_fake(x) or x.is_meta or 0 in rows.shape:
        return rows.new_zeros(len(rows), count + 2, dtype=dtype)
    directions = _directions(tuple(real.shape[1:]), count, dtype, rows.device)
    at_once = max(1, _AT_ONCE // min(_STEP, rows.shape[1]))
    return torch.cat([_of_some(some.to(dtype).contiguous(), directions) for some in rows.split(at_once)])


def difference(first: Tensor, second: Tensor) -> Difference:
    """What two tensors of fingerprints [rows, k + 2] say of the difference of their rows; see `ERROR`."""
    is_equal = ((first == second) | (first.isnan() & second.isnan())).all(1)
    distance = torch.linalg.vector_norm(first[:, :-2] - second[:, :-2], dim=1)
    relative = distance / first[:, -2]
    return Difference(distance.masked_fill(is_equal, 0), relative.masked_fill(is_equal, 0))


@dataclass(frozen=True)
class _Directions:
    """The directions for rows of one shape.

    count:   of the projections
    buckets: their number
    width:   the buckets, and zeros up to a number that the projections of a group divide
    parts:   where each part of a row begins, and the signs of its elements: as many as there are buckets, times a whole
             number, and at last those that remain
    copied:  [groups * width], buckets in random order for each group of projections, which they are added up to
    mixing:  [groups * width, 1], their signs, scaled so that the projections have the norm of the row in expectation
    """

    count: int
    buckets: int
    width: int
    parts: list[tuple[int, Tensor]]
    copied: Tensor
    mixing: Tensor


def _of_some(rows: Tensor, directions: _Directions) -> Tensor:
    """rows [r, n] -> [r, k + 2]."""
    buckets = rows.new_zeros(len(rows), directions.width)
    for begin, signs in directions.parts:
        signed = rows.narrow(1, begin, len(signs)) * signs
        if len(signs) > directions.buckets:
            signed = _added(signed, directions.buckets)
        buckets.narrow(1, 0, signed.shape[1]).add_(signed)
    copies = buckets.t().contiguous().index_select(0, directions.copied).mul_(directions.mixing)
    projections = _added(copies.view(1, -1), directions.count * len(rows)).view(-1, len(rows))
    largest = torch.maximum(rows.amax(1, keepdim=True), -rows.amin(1, keepdim=True))
    return torch.cat([projections.t(), _norms(rows), largest], 1)


def _added(x: Tensor, width: int) -> Tensor:
    """x [r, n * width] -> [r, width]: the parts of each row, added one after the other."""
    parts = x.unflatten(1, (-1, 1, width)).movedim(3, 1)
    return avg_pool2d(parts, (parts.shape[2], 1), divisor_override=1).flatten(1)


def _norms(rows: Tensor) -> Tensor:
    """rows [r, n] -> [r, 1]: the norms, of the norms of parts."""
    width = _NORM_OF if rows.device.type == "cpu" else _NORM_OF_ON_GPU
    norms = rows
    while norms is rows or norms.shape[1] > 1:
        parts, rest = divmod(norms.shape[1], width)
        found: list[Tensor] = []
        if parts:
            whole = norms.narrow(1, 0, parts * width).unflatten(1, (parts, width))
            found.append(torch.linalg.vector_norm(whole, dim=2))
        if rest:
            last = norms.narrow(1, parts * width, rest)
            found.append(torch.linalg.vector_norm(last, dim=1, keepdim=True))
        norms = torch.cat(found, 1)
    return norms


@lru_cache(maxsize=32)
@unset_fake_temporarily()
@ordinary_tensors()
def _directions(shape: tuple[int, ...], count: int, dtype: torch.dtype, device: torch.device) -> _Directions:
    """The directions for rows of a shape, from a stream of random bits that SHAKE-128 defines on every machine."""
    name = f"hookrun fingerprint {count} {list(shape)}"
    size = prod(shape)
    groups = gcd(count, 4)
    width = count // groups
    while width < max(256, 4 * count):
        width *= 2
    buckets = _prime_below(width, shape)
    signs = _signs(f"{name} signs", min(size, _SIGNS)).to(device, dtype)
    whole = size - size % buckets
    step = max(1, _STEP // buckets) * buckets
    begins = [*range(0, whole, step), whole]
    starts = begins
    if size > _SIGNS:
        starts = (_random(f"{name} starts", 4 * len(begins)).view(torch.int32) % (_SIGNS - step)).tolist()
    parts = list[tuple[int, Tensor]]()
    for begin, end, start in zip(begins, [*begins[1:], size], starts, strict=True):
        if begin < end:
            parts.append((begin, signs.narrow(0, start, end - begin)))
    orders = _random(f"{name} orders", 4 * groups * width).view(torch.int32).view(groups, width)
    places = orders.argsort(dim=1, stable=True).view(groups, -1, count // groups)
    mixing = _signs(f"{name} mixing", groups * width) / sqrt(groups)
    return _Directions(
        count=count,
        buckets=buckets,
        width=width,
        parts=parts,
        copied=places.transpose(0, 1).flatten().to(device),
        mixing=mixing.unsqueeze(1).to(device, dtype),
    )


def _prime_below(limit: int, shape: tuple[int, ...]) -> int:
    """The largest prime number below a limit that divides no size."""
    return next(
        number
        for number in range(limit - 1, 1, -1)
        if all(number % divisor for divisor in range(2, isqrt(number) + 1))
        and all(size % number for size in shape)
    )


def _signs(name: str, count: int) -> Tensor:
    """[count] float64 of 1 and -1."""
    bits = _random(name, -(-count // 8)).unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device="cpu")
    return 1 - 2 * (bits & 1).flatten()[:count].double()


def _random(name: str, count: int) -> Tensor:
    """[count] random bytes, always the same for a name."""
    return torch.frombuffer(bytearray(shake_128(name.encode()).digest(count)), dtype=torch.uint8)
