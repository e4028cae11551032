"""The statistics of a large CPU tensor, part by part, so that memory is read once and further passes hit the cache."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def in_blocks(flat: Tensor, wanted: Collection[str], size: int) -> dict[str, Any]:
    """`sum`, `mean` and, if wanted, `extremes` (as by `aminmax`), `norm` and `var`: each [], in the tensor's dtype.

    flat: [n] float32 or float64, n > 1, that requires no gradient
    size: number of elements in a part
    """
    import torch

    parts = flat.split(size)
    sums, lows, highs, norms, spreads = (list["Tensor"]() for _ in range(5))
    around = torch.empty_like(parts[0])
    for part in parts:
        sums.append(part.sum())
        if "extremes" in wanted:
            lows.append(part.amin())  # on the CPU amin and amax together are faster than aminmax
            highs.append(part.amax())
        if "norm" in wanted:
            norms.append(part.dot(part))
        if "var" in wanted:
            mean = sums[-1] / len(part)
            difference = torch.sub(part, mean, out=around[: len(part)])
            spreads += (mean, difference.sum(), difference.dot(difference))
    total = torch.stack(sums).double().sum()
    found: dict[str, Any] = {"sum": total, "mean": total / flat.numel()}
    if norms:
        found["norm"] = torch.stack(norms).double().sum().sqrt()
    if spreads:
        found["var"] = _together(torch.stack(spreads).double().view(-1, 3), [len(part) for part in parts])
    found = {name: value.to(flat.dtype) for name, value in found.items()}
    if lows:
        found["extremes"] = torch.return_types.aminmax((torch.stack(lows).amin(), torch.stack(highs).amax()))
    return found


def _together(spreads: Tensor, lengths: Collection[int]) -> Tensor:
    """The unbiased variance [] over all parts (Chan, Golub and LeVeque 1983).

    spreads: [parts, 3]; for each part a centre, the sum of the differences to it, and the sum of their squares
    """
    counts = spreads.new_tensor(list(lengths))
    centres, off, squares = spreads.unbind(1)
    means = centres + off / counts
    within = (squares - off.square() / counts).clamp_min(0)
    n = counts.sum()
    between = counts * (means - (counts * means).sum() / n).square()
    return (within + between).sum() / (n - 1)
