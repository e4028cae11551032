"""Fingerprints: a few numbers for each row of a tensor, by which two runs are compared without the rows themselves.

A row is added up, with random signs, in p buckets: element i in bucket i mod p, as in the count sketch of Charikar,
Chen and Farach-Colton. p is a prime that divides no size of the row and neither of the numbers beside it, so that a
token, a channel, a head, a diagonal and any other regular part of the row is spread over the buckets. Where there are
more buckets than projections, the last ones are added to the first ones.

Each step adds tensors element by element, in an order that depends on the shape of a row only. Therefore equal rows
have equal fingerprints, bit for bit, in any batch and with any number of threads.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import shake_128
from math import ceil, gcd, isqrt, prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake, unset_fake_temporarily
from torch.nn.functional import avg_pool2d, pad

from hookrun.engine.values.containers import functorch_level
from hookrun.engine.values.tensors import as_real, ordinary_tensors, widened

ERROR = 0.25
"""With 64 projections, of 100 estimated norms 95 are within this share of the true ones; with k, sqrt(64 / k) of it."""

_STEP = 2**16  # elements of a row that are added at once
_AT_ONCE = 2**20  # elements of several rows that are added at once: they stay in the caches of a processor
_SIGNS = 2**18  # signs that are stored; in longer rows each step begins at a random one
_NORM_OF = 4096  # elements of which a norm is taken at once
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
    # few operators and few functions: after a large module none of their code is in the cache of a processor
    real = x.resolve_neg() if x.dtype == torch.float32 else _computable(x)
    size = real.numel()
    is_ordinary = type(x) is Tensor and functorch_level() is None
    if not size or x.is_meta or (not is_ordinary and is_fake(x)):
        return real.new_zeros(len(real), count + 2)
    at_once = max(1, _AT_ONCE * len(real) // size)
    if len(real) > at_once:
        return torch.cat([fingerprints(some, count) for some in x.split(at_once)])
    directions = _directions(real.shape[1:], count, real.dtype, real.device)
    return _of_some(real.contiguous().view(len(real), -1), directions, count)


def _computable(x: Tensor) -> Tensor:
    """The elements as real numbers of 32 bits at least."""
    real, _ = as_real(widened(x))
    return real.to(torch.promote_types(real.dtype, torch.float32))


def difference(first: Tensor, second: Tensor) -> Difference:
    """What two tensors of fingerprints [rows, k + 2] say of the difference of their rows; see `ERROR`."""
    is_equal = ((first == second) | (first.isnan() & second.isnan())).all(1)
    distance = torch.linalg.vector_norm(first[:, :-2] - second[:, :-2], dim=1)
    relative = distance / first[:, -2]
    return Difference(distance.masked_fill(is_equal, 0), relative.masked_fill(is_equal, 0))


class _Directions(NamedTuple):
    """The directions for rows of one shape.

    buckets: their number, at least that of the projections
    width:   the elements that are added at once, as many as there are buckets, times a whole number
    parts:   where each `width` elements of a row begin, and their signs; 0 where the part before has the element too
    """

    buckets: int
    width: int
    parts: list[tuple[int, Tensor]]


def _of_some(rows: Tensor, directions: _Directions, count: int) -> Tensor:
    """rows [r, n] -> [r, count + 2]."""
    buckets = _buckets(rows, directions)
    projections = buckets.narrow(1, 0, count)
    for begin in range(count, directions.buckets, count):
        projections[:, : directions.buckets - begin].add_(buckets[:, begin : begin + count])
    return torch.cat([projections, _norms(rows), _largest(rows)], 1)


def _buckets(rows: Tensor, directions: _Directions) -> Tensor:
    """rows [r, n] -> [r, buckets]: the elements of each row, with their signs, added one after the other."""
    count, width, parts = directions
    if rows.shape[1] < count:
        rows = pad(rows, (0, count - rows.shape[1]))
    begin, signs = parts[0]
    sums = rows.narrow(1, begin, width) * signs
    for begin, signs in parts[1:]:
        sums.addcmul_(rows.narrow(1, begin, width), signs)
    # with the buckets as channels, which come last in memory, many are added by one instruction
    height = width // count
    images = sums.as_strided((len(rows), count, height, 1), (width, 1, count, count))
    return avg_pool2d(images, (height, 1), divisor_override=1).view(len(rows), count)


def _norms(rows: Tensor) -> Tensor:
    """rows [r, n] -> [r, 1]: the norms, of the norms of parts."""
    width = _NORM_OF if rows.device.type == "cpu" else _NORM_OF_ON_GPU
    count, rest = divmod(rows.shape[1], width)
    if not count or rows.shape[1] == width:
        return torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    whole = rows.narrow(1, 0, count * width) if rest else rows
    norms = torch.linalg.vector_norm(whole.view(-1, count, width), dim=2)
    if rest:
        norms = torch.cat([norms, _norms(rows.narrow(1, count * width, rest))], 1)
    return _norms(norms)


def _largest(rows: Tensor) -> Tensor:
    """rows [r, n] -> [r, 1]: the largest absolute values."""
    # both in one pass are fast over a whole tensor, and slow along a dimension
    least, largest = rows.aminmax() if len(rows) == 1 else (rows.amin(1), rows.amax(1))
    return torch.maximum(largest, least.neg_()).view(-1, 1)


@lru_cache(maxsize=32)
@unset_fake_temporarily()
@ordinary_tensors()
def _directions(shape: tuple[int, ...], count: int, dtype: torch.dtype, device: torch.device) -> _Directions:
    """The directions for rows of a shape, from a stream of random bits that SHAKE-128 defines on every machine."""
    name = f"hookrun fingerprint {count} {list(shape)}"
    buckets = _prime(count, shape)
    size = max(buckets, prod(shape))
    width = buckets * ceil(size / (buckets * max(2, ceil(size / _STEP))))
    signs = _signs(f"{name} signs", min(size, max(_SIGNS, 2 * width))).to(device, dtype)
    parts: list[tuple[int, Tensor]] = []
    for number, begin in enumerate([*range(0, size - width, width), size - width]):
        start = begin
        if size > len(signs):
            # parts that share a sign have it in different buckets
            drawn = int(_random(f"{name} start {number}", 4).view(torch.int32))
            start = drawn % ((len(signs) - width) // buckets) * buckets + number % buckets
        doubled = number * width - begin
        of_part = signs.narrow(0, start + doubled, width - doubled)
        parts.append((begin, pad(of_part, (doubled, 0)) if doubled else of_part))
    return _Directions(buckets, width, parts)


def _prime(least: int, shape: tuple[int, ...]) -> int:
    """The smallest prime number, at least `least`, that divides no size and no number beside one."""
    sizes = prod(size * (size + 1) * max(1, size - 1) for size in shape)
    number = max(2, least)
    while gcd(number, sizes) > 1 or any(number % each == 0 for each in range(2, isqrt(number) + 1)):
        number += 1
    return number


def _signs(name: str, count: int) -> Tensor:
    """[count] float64 of 1 and -1."""
    bits = _random(name, -(-count // 8)).unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device="cpu")
    return 1 - 2 * (bits & 1).flatten()[:count].double()


def _random(name: str, count: int) -> Tensor:
    """[count] random bytes, always the same for a name."""
    return torch.frombuffer(bytearray(shake_128(name.encode()).digest(count)), dtype=torch.uint8)
