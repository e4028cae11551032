"""The statistics of tensors: their names, their options, and one definition of each.

A definition is a function of rows [R, ...] alone, without a wait for the device: R is 1 for a whole tensor and the size
of `dim` where a dimension is kept. The same definition serves each firing, compiled graphs and rules over time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from hookrun.engine.actions.fields import Count, Finite, OneOrMore
from hookrun.engine.validation import Section

if TYPE_CHECKING:
    from torch import Tensor

MOST_NUMBERS = 4096
"""The largest number of numbers in a record."""

INTEGER = frozenset({"counts", "min", "max", "mean", "bytes", "numel"})
"""The statistics that integer and boolean tensors have too."""


class QuantilesOf(Section):
    """`{quantiles: [0.01, 0.5, 0.99]}`: the numbers below which so much of the tensor lies, as by torch.quantile."""

    quantiles: OneOrMore[Annotated[float, Field(strict=True, ge=0, le=1)]]


class Bins(Section):
    """How a histogram counts: so many bins of equal width, from the smallest to the largest element or over a range."""

    bins: Annotated[int, Field(strict=True, ge=1, le=MOST_NUMBERS // 2 - 1)] = 64
    range: Literal["auto"] | tuple[Finite, Finite] = "auto"


class HistogramOf(Section):
    """`{histogram: {bins: 64, range: auto}}`: how many elements lie in each bin, as by torch.histc."""

    histogram: Bins


class CountsOf(Section):
    """`{counts: 64}`: how often each of the whole numbers 0 … 63 occurs, as by torch.bincount."""

    counts: Annotated[Count, Field(le=MOST_NUMBERS)]


class Distribution(Section):
    """What the last dimension holds."""

    of: Literal["scores", "probabilities"] = "scores"


class EntropyOf(Section):
    """`{entropy: {of: probabilities}}`: the entropy of probabilities instead of scores."""

    entropy: Distribution


Options = QuantilesOf | HistogramOf | CountsOf | EntropyOf


class Rows(dict[str, Any]):
    """Rows `x` [R, ...], the number of elements `n` of a row, and their statistics, each computed once when asked for.

    x:    floating-point numbers in which torch computes, or integers
    tiny: the smallest normal number of the tensor's own dtype
    """

    def __init__(self, x: Tensor, tiny: float = 0.0) -> None:
        super().__init__()
        self.x = x
        self.flat = x.flatten(1)
        self.n = self.flat.shape[1]
        self.tiny = tiny

    def __missing__(self, name: str) -> Tensor:
        value = _DEFINITIONS[name](self)
        self[name] = value
        return value


Definition = Callable[[Rows], "Tensor"]
"""Rows [R, ...] -> [R], or [R, k] for a list of k numbers."""


@dataclass(frozen=True, slots=True)
class Statistic:
    """A statistic with its options.

    key:      its name in a record
    define:   its definition
    length:   how many numbers there are for each row; None: one number that is not in a list
    in_graph: a compiled graph can compute it
    """

    key: str
    define: Definition
    length: int | None = None
    in_graph: bool = True

    @property
    def is_number(self) -> bool:
        """Whether it is one number for each row."""
        return self.length is None

    def value(self, numbers: Sequence[Any]) -> Any:
        """What a record holds of a row: a number, a list, or for a histogram its counts and edges."""
        if self.length is None:
            return numbers[0]
        if self.key != "histogram":
            return list(numbers)
        bins = self.length // 2
        return {"counts": [int(number) for number in numbers[:bins]], "edges": list(numbers[bins:])}


def statistic(item: str | Options) -> Statistic:
    """The statistic that an item of `of` names."""
    if isinstance(item, str):
        return Statistic(item, lambda rows: rows[item])
    if isinstance(item, QuantilesOf):
        return _quantiles(item.quantiles)
    if isinstance(item, HistogramOf):
        return _histogram(item.histogram)
    if isinstance(item, CountsOf):
        return _counts(item.counts)
    if item.entropy.of == "scores":
        return Statistic("entropy", _entropy_of_scores)
    return Statistic("entropy", _entropy_of_probabilities)


def rows_of(x: Tensor, dim: int | None = None) -> Rows:
    """The rows of a tensor: itself as one row, or one for each index of the dimension that is kept.

    Floating-point numbers of small dtypes are widened to float32.
    """
    import torch

    tiny = torch.finfo(x.dtype).tiny if x.is_floating_point() else 0.0
    if x.is_floating_point() and x.dtype is not torch.float64:
        x = x.float()
    return Rows(x.unsqueeze(0) if dim is None else x.movedim(dim, 0), tiny)


def numbers_of(rows: Rows, of: Sequence[Statistic]) -> Tensor:
    """[R, k] float64: the numbers of all statistics side by side, in their order; it can be traced."""
    import torch

    columns: list[Tensor] = []
    for each in of:
        found = each.define(rows).double()
        columns.append(found.unsqueeze(1) if each.is_number else found)
    return torch.cat(columns, dim=1)


# ---- definitions ---------------------------------------------------------------------------------------------------


def _variance(rows: Rows) -> Tensor:
    if rows.n == 1:  # torch warns about it
        return rows.flat[:, 0] * math.nan
    return rows.flat.var(1)


def _dynamic_range(rows: Rows) -> Tensor:
    """log2(largest |x| / smallest non-zero |x|); NaN where all elements are 0."""
    size = rows.flat.abs()
    least = size.masked_fill(size == 0, math.inf).amin(1)
    return (size.amax(1) / least).log2()


def _underflows(rows: Rows) -> Tensor:
    """The share of the non-zero elements that are below the smallest normal number of the tensor's dtype."""
    size = rows.flat.abs()
    others = size != 0
    below = others & (size < rows.tiny)
    return below.sum(1) / others.sum(1)


def _entropy_of_scores(rows: Rows) -> Tensor:
    logs = rows.x.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1).flatten(1).mean(1)


def _entropy_of_probabilities(rows: Rows) -> Tensor:
    shares = rows.x / rows.x.sum(-1, keepdim=True)
    return -shares.xlogy(shares).sum(-1).flatten(1).mean(1)


_DEFINITIONS: Mapping[str, Definition] = {
    "mean": lambda rows: rows.flat.double().mean(1) if not rows.x.is_floating_point() else rows.flat.mean(1),
    "var": _variance,
    "std": lambda rows: rows["var"].sqrt(),
    "min": lambda rows: rows.flat.amin(1),
    "max": lambda rows: rows.flat.amax(1),
    "norm": lambda rows: rows.flat.square().sum(1).sqrt(),
    "abs_mean": lambda rows: rows.flat.abs().mean(1),
    "abs_max": lambda rows: rows["max"].maximum(-rows["min"]),
    "sum": lambda rows: rows.flat.sum(1),
    "zeros": lambda rows: (rows.flat == 0).sum(1) / rows.n,
    "nans": lambda rows: rows.flat.isnan().sum(1),
    "infs": lambda rows: rows.flat.isinf().sum(1),
    "dynamic_range": _dynamic_range,
    "underflows": _underflows,
    "entropy": _entropy_of_scores,
}


def _quantiles(at: Sequence[float]) -> Statistic:
    def define(rows: Rows) -> Tensor:
        import torch

        wanted = torch.tensor(at, dtype=rows.flat.dtype, device=rows.flat.device)
        return rows.flat.quantile(wanted, dim=1).T

    return Statistic("quantiles", define, len(at), in_graph=False)


def _histogram(wanted: Bins) -> Statistic:
    bins = wanted.bins

    def define(rows: Rows) -> Tensor:
        """[R, 2 * bins + 1]: the counts, then the edges."""
        import torch

        flat = rows.flat
        if isinstance(wanted.range, tuple):
            low = torch.full_like(flat[:, :1], wanted.range[0])
            high = torch.full_like(low, wanted.range[1])
        else:
            low = rows["min"].unsqueeze(1)
            high = rows["max"].unsqueeze(1)
            is_point = (low == high).to(flat.dtype)  # as torch.histc
            low = low - is_point
            high = high + is_point
        places = ((flat - low) / (high - low) * bins).floor().clamp(max=bins - 1)
        inside = (flat >= low) & (flat <= high)
        index = torch.where(inside, places, bins).long()
        counts = torch.zeros(len(flat), bins + 1, dtype=torch.float64, device=flat.device)
        counts = counts.scatter_add(1, index, torch.ones_like(flat, dtype=torch.float64))
        steps = torch.arange(bins + 1, device=flat.device) / bins
        edges = low + (high - low) * steps
        return torch.cat([counts[:, :bins], edges.double()], dim=1)

    return Statistic("histogram", define, 2 * bins + 1)


def _counts(count: int) -> Statistic:
    def define(rows: Rows) -> Tensor:
        import torch

        flat = rows.flat
        inside = (flat >= 0) & (flat < count)
        index = torch.where(inside, flat, count).long()
        counts = torch.zeros(len(flat), count + 1, dtype=torch.float64, device=flat.device)
        ones = torch.ones_like(flat, dtype=torch.float64)
        return counts.scatter_add(1, index, ones)[:, :count]

    return Statistic("counts", define, count)
