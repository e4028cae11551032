"""The action `stats`, and the statistics themselves, computed in few passes over a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from hookrun.engine.actions.base import Action, Edit, Halves, HookSite, Measured
from hookrun.engine.actions.fields import OneOrMore
from hookrun.engine.actions.statistics import numbers_of, rows_of, statistic
from hookrun.engine.values.tensors import elements, require_whole
from hookrun.errors import listed

if TYPE_CHECKING:
    from torch import Tensor

    from hookrun.engine.actions.statistics import Statistic as Wanted

Statistic = Literal[
    "mean",
    "std",
    "var",
    "min",
    "max",
    "norm",
    "abs_mean",
    "abs_max",
    "sum",
    "zeros",
    "nans",
    "infs",
    "bytes",
    "numel",
]
DEFAULT: tuple[Statistic, ...] = ("mean", "std", "min", "max", "norm")
SIZES = frozenset({"bytes", "numel"})
CPU_BLOCK = 1 << 19
"""Elements of a part that stays in the cache while it is read several times."""
_MOST_SQUARES = 1 << 18
"""Elements whose squares are added up in float32 by one call of `dot`, which has few accumulators."""
MOST_LOST = 8
"""The variance is E[x²] - E[x]² if it is more than this part of E[x²]: then the difference loses at most 3 bits.
Else it is computed around the mean in float64, as where x² is out of range; this takes longer."""
LEAST_SQUARE = 1e-30
"""Where x² is smaller in the mean, too many of its digits are below the range of float32."""
BLOCK = 1 << 30  # an accelerator's dot takes fewer than 2³¹ elements

Measure = Callable[..., dict[str, Any]]


class Stats(Action):
    """Record statistics of each tensor: mean, std, min, max and norm, or those that `of` names.

    of: any of `mean`, `std` and `var` (unbiased: divided by n - 1), `min`, `max`, `norm` (Euclidean), `abs_mean`,
        `abs_max`, `sum`, `zeros` (the fraction of elements that are 0), `nans` and `infs` (how many), `bytes`, `numel`

    Statistics are computed in float32, for float64 tensors in float64; for complex tensors they are those of the
    absolute value. As in PyTorch, the std of one element is NaN. Of an empty tensor `sum`, `norm` and the counts are 0
    and the rest is NaN. Integer and boolean tensors are recorded only if `of` contains nothing but `bytes` and `numel`.
    """

    action_name = "stats"
    observes = True
    of: OneOrMore[Statistic] = DEFAULT

    @property
    def any_dtype(self) -> bool:
        """Whether `of` contains sizes only, which integer and boolean tensors have too."""
        return SIZES.issuperset(self.of)

    def build(self, site: HookSite) -> Edit:
        """A function that records the statistics of each tensor as tensors [], without waiting for the device."""
        measure = measuring(self.of)
        emit = site.emit
        of = tuple(self.of)

        def stats(x: Tensor) -> None:
            emit(Measured(x, of, measure))

        return stats

    @property
    def not_in_graph(self) -> str | None:
        """None, unless `of` names a statistic that a graph cannot compute."""
        lacking = [found.key for found in map(statistic, self.of) if not found.in_graph]
        return f"computes {listed(lacking)}, which a graph cannot: leave it out of `of`" if lacking else None

    def halves(self, site: HookSite) -> Halves:
        """The statistics of each row, and whether the tensor has integers; of an empty tensor nothing."""
        import torch

        wanted = [statistic(item) for item in self.of]
        dim: int | None = getattr(self, "dim", None)
        read = partial(_read, self.of, dim)

        def measure(x: Tensor) -> Tensor:
            if not x.numel():
                return x.new_empty(0, dtype=torch.float64)
            is_integer = not (x.is_floating_point() or x.is_complex())
            kind = torch.full([1], float(is_integer), dtype=torch.float64, device=x.device)
            return torch.cat([numbers_of(rows_of(x, dim), wanted).flatten(), kind])

        return Halves(measure, lambda numbers: site.emit(read(numbers.tolist())), read)


def _read(of: Sequence[Statistic], dim: int | None, numbers: list[float]) -> dict[str, Any]:
    """What a record holds of the numbers that a compiled graph has computed."""
    import torch

    if not numbers:
        return measuring(of)(torch.empty(0, device="cpu"))
    wanted = [statistic(item) for item in of]
    width = sum(each.length or 1 for each in wanted)
    is_integer = numbers[-1] == 1
    found = dict[str, Any]()
    begin = 0
    for each in wanted:
        end = begin + (each.length or 1)
        rows = [each.value(numbers[row + begin : row + end]) for row in range(0, len(numbers) - 1, width)]
        if is_integer and each.key in ("min", "max"):
            rows = [int(row) for row in rows]
        found[each.key] = rows[0] if dim is None or each.key in SIZES else rows
        begin = end
    return found


class LazyStatistics(dict[str, Any]):
    """A tensor `x`, its `numel`, and its statistics so far; another one is computed when it is asked for."""

    def __init__(self, formulas: Mapping[str, Formula], sizes: Mapping[str, int], x: Tensor) -> None:
        super().__init__(sizes, x=x)
        self._formulas = formulas

    def __missing__(self, name: str) -> Any:
        value = self._formulas[name](self["x"], self["numel"], self)
        self[name] = value
        return value


Formula = Callable[["Tensor", int, LazyStatistics], Any]
"""(the tensor, its number of elements, others) -> a statistic."""

_FORMULAS: Mapping[str, Formula] = {
    "flat": lambda x, n, others: x.reshape(-1),
    "sum": lambda x, n, others: x.sum(),
    "mean": lambda x, n, others: x.mean(),
    # torch warns about the deviation of one element
    "var": lambda x, n, others: x.var() if n > 1 else others["sum"] * math.nan,
    "std": lambda x, n, others: x.std() if n > 1 else others["sum"] * math.nan,
    "norm": lambda x, n, others: _sum_of_squares(others["flat"], n).sqrt(),
    "extremes": lambda x, n, others: x.aminmax(),
    "min": lambda x, n, others: others["extremes"].min,
    "max": lambda x, n, others: others["extremes"].max,
    "abs_max": lambda x, n, others: others["extremes"].max.maximum(-others["extremes"].min),
    "abs_mean": lambda x, n, others: x.abs().mean(),
    "zeros": lambda x, n, others: (n - x.count_nonzero()) / n,
    "nans": lambda x, n, others: x.isnan().count_nonzero(),
    "infs": lambda x, n, others: x.isinf().count_nonzero(),
}
_EMPTY = {"sum": 0.0, "norm": 0.0, "nans": 0, "infs": 0, "bytes": 0, "numel": 0}


def measuring(of: Sequence[str]) -> Measure:
    """A function from a tensor of any dtype to the statistics named in `of`: tensors [], or plain numbers.

    Its second argument says whether numbers can be read from the tensor now, which is faster on the CPU: no mode, trace
    or transform sees what is computed.
    """
    import torch

    names = tuple(of)
    has_values = not SIZES.issuperset(names)
    empty = {name: _EMPTY.get(name, math.nan) for name in names}
    exact = {torch.float32, torch.float64}

    def measure(x: Tensor, readable: bool = False) -> dict[str, Any]:
        x = elements(x)
        n = x.numel()
        if not n:
            return dict(empty)
        sizes = {"numel": n, "bytes": n * x.element_size()}
        if not has_values:
            return {name: sizes[name] for name in names}
        require_whole(x)
        x = x.detach()
        if x.is_quantized:
            x = x.dequantize()
        elif x.is_complex():
            x = x.abs()
        elif x.dtype not in exact:
            x = x.float()
        statistics = LazyStatistics(_FORMULAS, sizes, x)
        if readable and x.device.type == "cpu":
            statistics.update(on_cpu(x.reshape(-1), names))
        return {name: statistics[name] for name in names}

    return measure


def _sum_of_squares(flat: Tensor, n: int) -> Tensor:
    """The sum of x² over a tensor of one dimension and n elements."""
    if n > BLOCK:
        squares = [part.dot(part) for part in flat.chunk(math.ceil(n / BLOCK))]
        return sum(squares[1:], squares[0])
    return flat.dot(flat)


# ---- tensors on the CPU, part by part: memory is read once, further passes hit the cache -----------------------


def on_cpu(flat: Tensor, names: Collection[str]) -> dict[str, Any]:
    """What `names` need of `sum`, `mean`, `extremes` (as by `aminmax`), `norm`, `var` and `std`, in few passes.

    flat: [n] float32 or float64, n > 0, that requires no gradient
    """
    import torch

    n = flat.numel()
    variance_wanted = "std" in names or "var" in names
    squares_wanted = variance_wanted or "norm" in names
    extremes_wanted = "min" in names or "max" in names or "abs_max" in names
    total = 0.0
    squares = 0.0
    lows = list["Tensor"]()
    highs = list["Tensor"]()
    for part in flat.split(CPU_BLOCK):
        total += part.sum().item()
        if squares_wanted:
            squares += sum(piece.dot(piece).item() for piece in part.split(_MOST_SQUARES))
        if extremes_wanted:
            lows.append(part.amin())  # amin and amax together are faster than aminmax
            highs.append(part.amax())
    statistics: dict[str, Any] = {"flat": flat, "sum": total, "mean": total / n}
    if squares_wanted:
        statistics["norm"] = math.sqrt(squares)
    if variance_wanted:
        spread = squares - total * total / n
        if not n * LEAST_SQUARE < squares < MOST_LOST * spread:
            deviation = flat.std(correction=0).item()
            spread = deviation * deviation * n
        statistics["var"] = spread / (n - 1) if n > 1 else math.nan
        statistics["std"] = math.sqrt(statistics["var"])
    if extremes_wanted:
        statistics["extremes"] = torch.return_types.aminmax(
            (torch.stack(lows).amin(), torch.stack(highs).amax())
        )
    return statistics
