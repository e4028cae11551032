"""The action `stats`, and the statistics themselves, computed in few passes over a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, field_validator

from hookrun.engine.actions.base import FORMS, Action, Edit, Halves, HookSite, Measured
from hookrun.engine.actions.lanes import TensorsOfLanes, needs_of
from hookrun.engine.actions.statistics import (
    INTEGER,
    MOST_SQUARES,
    SIZES,
    Items,
    Name,
    Options,
    Rows,
    columns_of,
    count_along,
    count_of,
    numbers_in,
    require_dim,
    require_dtype,
    rows_of,
    sizes_of,
    statistics,
)
from hookrun.engine.actions.statistics import Statistic as Wanted
from hookrun.engine.values.tensors import elements, is_integer, require_whole
from hookrun.errors import listed

if TYPE_CHECKING:
    from torch import Tensor

Statistic = Name
DEFAULT: tuple[Statistic, ...] = ("mean", "std", "min", "max", "norm")
CPU_BLOCK = 1 << 19
"""Elements of a part that stays in the cache while it is read several times."""
MOST_LOST = 8
"""The variance is E[x²] - E[x]² if it is more than this part of E[x²]: then the difference loses at most 3 bits.
Else it is computed around the mean in float64, as where x² is out of range; this takes longer."""
LEAST_SQUARE = 1e-30
"""Where x² is smaller in the mean, too many of its digits are below the range of float32."""

Measure = Callable[..., dict[str, Any]]


class Stats(Action):
    """Record statistics of each tensor: mean, std, min, max and norm, or those that `of` names.

    of:  any of `mean`, `std` and `var` (unbiased: divided by n - 1), `min`, `max`, `norm` (Euclidean), `abs_mean`,
         `abs_max`, `sum`, `zeros` (the fraction of elements that are 0), `nans` and `infs` (how many), `entropy`,
         `dynamic_range`, `underflows`, `bytes`, `numel`, and of `{quantiles: [0.01, 0.5, 0.99]}`,
         `{histogram: {bins: 64, range: auto}}`, `{counts: 64}`, `{entropy: {of: probabilities}}`
    dim: the dimension that is kept: each statistic is a list with one for each index of it, at most 4,096 numbers a
         record. It is a dimension of the part that `index`, `tokens` and `heads` choose; -1 is the last one

    Statistics are computed in float32, for float64 tensors in float64; for complex tensors they are those of the
    absolute value. As in PyTorch, the std of one element is NaN. Of an empty tensor `sum`, `norm` and the counts are 0
    and the rest is NaN.

    `entropy` is in nats: that of softmax over the last dimension, or of probabilities divided by their sum, as the mean
    over the other dimensions. `dynamic_range` is log2 of the largest absolute value over the smallest one except 0.
    `underflows` is the fraction of the non-zero elements below the smallest normal number of the tensor's dtype.

    `quantiles` are those of torch.quantile, which sorts the elements; a NaN makes all of them NaN. `histogram` has the
    `counts` of bins of equal width and their `edges`, from the smallest to the largest finite element, or over a range
    `[low, high]`; what lies outside is not counted, nor are NaN and infinities. If no element is finite, the edges are
    NaN. `counts` says how often each of the integers 0 to 63 occurs. `bytes` and `numel` are always those of the whole
    tensor.

    Integer and boolean tensors have `counts`, `min`, `max`, `mean`, `bytes` and `numel`, other tensors all but
    `counts`. In a value of several tensors without `target` the floating-point ones are recorded, with `counts` the
    integers, and all of them if `of` has nothing but `bytes` and `numel`. A hook that would record nothing at any of
    its modules is refused before the run; of another one the plan says where it records nothing.
    """

    action_name = "stats"
    observes = True
    of: Items = DEFAULT
    dim: Annotated[int, Field(strict=True)] | None = None

    @field_validator("of")
    @classmethod
    def _differ(cls, of: tuple[Statistic | Options, ...]) -> tuple[Statistic | Options, ...]:
        statistics(of)
        return of

    @property
    def any_dtype(self) -> bool:
        """Whether `of` contains sizes only, which integer and boolean tensors have too."""
        return SIZES.issuperset(self.of)

    def takes_tensor(self, x: Tensor, *, alone: bool) -> bool:
        """Of several tensors those that `of` is about; also integers alone, if they have the statistics."""
        if self.any_dtype:
            return True
        keys = {each.key for each in statistics(self.of)}
        if is_integer(x):
            return "counts" in keys or (alone and keys <= INTEGER)
        return super().takes_tensor(x, alone=alone) and "counts" not in keys

    def require_tensor(self, x: Tensor) -> None:
        """Refuse integers if they do not have the statistics."""
        require_dtype(x, statistics(self.of))

    def build(self, site: HookSite) -> Edit:
        """A function that records the statistics of each tensor as tensors [], without waiting for the device."""
        measure = measuring(self.of, self.dim)
        emit = site.emit
        together = tuple(item for item in self.of if isinstance(item, str))
        if self.dim is not None or len(together) < len(self.of):
            together = ()

        def stats(x: Tensor) -> None:
            emit(Measured(x, together, measure))

        return stats

    @property
    def not_in_graph(self) -> str | None:
        """None, unless `of` names a statistic that a graph cannot compute."""
        lacking = [each.key for each in statistics(self.of) if not each.in_graph]
        return f"computes {listed(lacking)}, which a graph cannot: leave it out of `of`" if lacking else None

    def halves(self, site: HookSite) -> Halves:
        """The numbers of each statistic, and before them, if there can be integers, whether these are of integers."""
        wanted = statistics(self.of)
        read = partial(_records_of, wanted, self.dim)
        measure = partial(_columns, wanted, self.dim)
        halves = Halves(measure, read, count=partial(_count_of, wanted, self.dim))
        if self.dim is not None:
            return halves
        return replace(halves, needs=needs_of(wanted), finish=partial(_finished, wanted))


def _may_be_integers(wanted: Sequence[Wanted]) -> bool:
    return INTEGER.issuperset(each.key for each in wanted)


def _count_of(wanted: Sequence[Wanted], dim: int | None, shape: Sequence[int]) -> int | None:
    """How many numbers `_columns` are of a tensor of this shape."""
    count = count_along(dim, count_of(wanted), shape)
    return None if count is None else _may_be_integers(wanted) + count


def _columns(wanted: Sequence[Wanted], dim: int | None, x: Tensor) -> list[Tensor]:
    """What `_records_of` reads, as tensors [n] float64."""
    import torch

    if dim is not None:
        require_dim(dim, x.shape, wanted)
    columns: list[Tensor] = []
    if _may_be_integers(wanted):
        columns.append(torch.full([1], is_integer(x) and x.numel() > 0, dtype=torch.float64, device=x.device))
    if x.numel():
        return columns + columns_of(rows_of(x.detach(), dim), wanted)
    rows = 1 if dim is None else x.shape[dim]
    for each in wanted:
        numbers = each.numbers_of_nothing()
        columns.append(torch.tensor(numbers, dtype=torch.float64, device=x.device).repeat(rows))
    return columns


def _finished(wanted: Sequence[Wanted], rows: TensorsOfLanes) -> list[Tensor]:
    """As `_columns`, of floating-point tensors that are known by their lanes."""
    columns = [each.define(rows) for each in wanted]
    if _may_be_integers(wanted):
        columns.insert(0, rows.length * 0)
    return columns


def _records_of(
    wanted: Sequence[Wanted], dim: int | None, record: dict[str, Any], numbers: list[float]
) -> list[dict[str, Any]]:
    """The record with its statistics. numbers: of a compiled graph"""
    may_be_integers = _may_be_integers(wanted)
    are_integers = may_be_integers and bool(numbers[0])
    begin = int(may_be_integers)
    places = (len(numbers) - begin) // count_of(wanted)
    for each in wanted:
        length = each.length or 1
        end = begin + places * length
        rows = [each.value(numbers[row : row + length]) for row in range(begin, end, length)]
        if are_integers and each.key in ("min", "max"):
            rows = [int(row) for row in rows]
        if dim is not None and each.key not in SIZES:
            record[each.key] = rows
        else:
            record[each.key] = rows[0] if rows else 0
        begin = end
    return [record]


def measuring(of: Sequence[Statistic | Options], dim: int | None = None) -> Measure:
    """A function from a tensor to the statistics that `of` names: tensors [] and [k], or plain numbers and lists.

    Its second argument says whether numbers can be read from the tensor now, which is faster on the CPU: no mode, trace
    or transform sees what is computed.

    Of integers the statistics that `stats` does not give for them are those of the floating-point numbers, and then so
    are the others.

    dim: the dimension that is kept; it comes first in the statistics

    ValueError for a tensor that has too many places along `dim`.
    """
    return _measuring(tuple(of), dim)


@cache
def _measuring(of: tuple[Statistic | Options, ...], dim: int | None) -> Measure:
    """As `measuring`; for equal arguments the same function, so that a trial run knows what it has tried."""
    wanted = statistics(of)
    names = tuple(each.key for each in wanted)
    has_values = not SIZES.issuperset(names)
    needs_floats = not INTEGER.issuperset(names)
    forms = {each.key: partial(_in_form, each.value) for each in wanted if each.key == "histogram"}

    def measure(x: Tensor, readable: bool = False) -> dict[str, Any]:
        if x.is_nested and (dim is not None or "entropy" in names):
            raise ValueError(
                "the parts of a nested tensor have no dimension in common, as dim and entropy need it"
            )
        x = elements(x)
        if dim is not None:
            require_dim(dim, x.shape, wanted)
        sizes = sizes_of(x)
        if not x.numel():
            return _of_nothing(wanted, None if dim is None else x.shape[dim])
        if not has_values:
            return {name: sizes[name] for name in names}
        require_whole(x)
        x = x.detach()
        if needs_floats and is_integer(x):
            x = x.float()
        if dim is None:
            numbers = numbers_in(x)
            rows = Rows(numbers, numbers.reshape(-1), x.dtype)
            if readable and numbers.device.type == "cpu" and numbers.is_floating_point():
                rows.update(on_cpu(rows.flat, names))
        else:
            rows = rows_of(x, dim)
        rows.update(sizes)
        found: dict[str, Any] = {each.key: each.define(rows) for each in wanted}
        if forms:
            found[FORMS] = forms
        return found

    return measure


def _of_nothing(wanted: Sequence[Wanted], places: int | None) -> dict[str, Any]:
    """The statistics of a tensor without elements; places: how many the dimension has that is kept."""
    found = {each.key: each.of_nothing() for each in wanted}
    if places is None:
        return found
    return {key: value if key in SIZES else [value] * places for key, value in found.items()}


def _in_form(value: Callable[[Sequence[Any]], Any], numbers: Sequence[Any]) -> Any:
    """What a record holds of the numbers of one row, or of each of several: of a dimension, or of `torch.vmap`."""
    if isinstance(numbers[0], list):
        return [_in_form(value, row) for row in numbers]
    return value(numbers)


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
    lows: list[Tensor] = []
    highs: list[Tensor] = []
    for part in flat.split(CPU_BLOCK):
        total += part.sum().item()
        if squares_wanted:
            squares += sum(piece.dot(piece).item() for piece in part.split(MOST_SQUARES))
        if extremes_wanted:
            lows.append(part.amin())  # amin and amax together are faster than aminmax
            highs.append(part.amax())
    found: dict[str, Any] = {"sum": total, "mean": total / n}
    if squares_wanted:
        found["norm"] = math.sqrt(squares)
    if variance_wanted:
        spread = squares - total * total / n
        if not n * LEAST_SQUARE < squares < MOST_LOST * spread:
            deviation = flat.std(correction=0).item()
            spread = deviation * deviation * n
        found["var"] = spread / (n - 1) if n > 1 else math.nan
        found["std"] = math.sqrt(found["var"])
    if extremes_wanted:
        found["extremes"] = torch.stack(lows).amin(), torch.stack(highs).amax()
    return found
