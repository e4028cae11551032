"""LayerNorm and RMSNorm with a fixed scale, which makes them linear maps (and a bias)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from hookrun.errors import HookrunError
from hookrun.tasks.training.finite import not_finite

_EPS = ("eps", "variance_epsilon", "epsilon", "norm_eps")


@dataclass(frozen=True)
class FrozenNorm:
    """x -> (x - mean(x), or x without centering) * scale * weight. The caller adds `bias` once to a sum of results.

    centers: subtract the mean, as LayerNorm
    scale:   [N, 1], 1 / the standard deviation, or root mean square, of the rows on which the norm was frozen
    weight:  [D]; None: ones
    bias:    [D]; None: zeros
    """

    centers: bool
    scale: Tensor
    weight: Tensor | None
    bias: Tensor | None

    def __call__(self, rows: Tensor) -> Tensor:
        """The linear part, without the bias, of rows [N, D]."""
        rows = rows - rows.mean(-1, keepdim=True) if self.centers else rows
        rows = rows * self.scale
        return rows if self.weight is None else rows * self.weight


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32; a float64 tensor stays as it is."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def rounding(dtype: torch.dtype, expected: Tensor) -> Tensor:
    """[N, 1]: the largest accepted difference between two computations of the rows `expected` [N, D] in this dtype.

    Models in float64 may compute norms in float32.
    """
    eps = max(torch.finfo(each).eps for each in (dtype, torch.float32))
    return 64 * eps * expected.abs().amax(-1, keepdim=True).clamp_min(1e-30)


def frozen(path: str, module: nn.Module, rows: Tensor, expected: Tensor) -> FrozenNorm:
    """The norm with the scale that it has on `rows` [N, D], for which it returned `expected` [N, D].

    Raises HookrunError if the module computes neither LayerNorm nor RMSNorm, or returned NaN or infinity.
    """
    if bad := not_finite(expected):
        raise HookrunError(
            f"{path} ({type(module).__name__}) returned {bad}, so its scale cannot be frozen; a `check` hook on the "
            "blocks finds where they begin, and task.parts=residual task.norm=applied reads the rest"
        )
    dtype, rows, expected = rows.dtype, wide(rows), wide(expected)
    best, least = None, None
    for candidate in _candidates(module, rows):
        made = candidate(rows)
        made = made if candidate.bias is None else made + candidate.bias
        wrong = float((made - expected).abs().amax()) if made.shape == expected.shape else float("inf")
        if least is None or wrong < least:
            best, least = (candidate, made), wrong
    if best is not None and bool(((best[1] - expected).abs() <= rounding(dtype, expected)).all()):
        return best[0]
    raise HookrunError(
        f"{path} ({type(module).__name__}) computes neither LayerNorm nor RMSNorm, so its scale cannot be frozen: "
        "use task.norm=applied with task.parts=residual, or name the norm with task.final_norm"
    )


def _candidates(module: nn.Module, rows: Tensor) -> Iterator[FrozenNorm]:
    given: Any = next(
        (value for name in _EPS if isinstance(value := getattr(module, name, None), float)), None
    )
    known = (torch.finfo(rows.dtype).eps, 1e-5, 1e-6) if given is None else (given,)
    parameters = [getattr(module, name, None) for name in ("weight", "bias")]
    weight, bias = (wide(each.detach()) if isinstance(each, Tensor) else None for each in parameters)
    for parameter in (weight, bias):
        last = 1 if parameter is None else parameter.shape[-1:].numel()
        if parameter is not None and (parameter.numel() != last or last not in (1, rows.shape[-1])):
            return  # it has neither one value, nor one for each of the features
    mean = rows.mean(-1, keepdim=True)
    weights = (None,) if weight is None else (weight, 1 + weight)  # Gemma multiplies by 1 + weight
    for eps, weighted in product(known, weights):
        spread = ((rows - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
        yield FrozenNorm(True, spread, weighted, bias)
        size = (rows.square().mean(-1, keepdim=True) + eps).rsqrt()
        yield FrozenNorm(False, size, weighted, bias)
