"""The statistics of tensors: their names, their options, and one definition of each.

A definition is a function of rows alone, without a wait for the device. The same definition serves each firing, small
tensors that are measured together, compiled graphs and rules over time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, model_validator
from pydantic import Tag as Kind

from hookrun.engine.actions.base import Absent
from hookrun.engine.actions.fields import Count, Finite, OneOf, OneOrMore
from hookrun.engine.validation import Section
from hookrun.engine.values.tensors import is_integer
from hookrun.errors import close, counted, listed

if TYPE_CHECKING:
    from torch import Tensor, dtype

Name = Literal[
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
    "entropy",
    "dynamic_range",
    "underflows",
    "bytes",
    "numel",
]
"""The statistics that are one number and need no options."""

MOST_NUMBERS = 4096
"""The largest number of numbers in a record."""

MOST_SQUARES = 1 << 18
"""Elements whose squares are added up in float32 by one call of `dot`, which has few accumulators."""

MOST_EXACT = 1 << 24
"""Up to this number float32 counts exactly."""

LARGEST = (2 - 2**-23) * 2.0**127
"""The largest number of float32."""

SIZES = frozenset({"bytes", "numel"})
"""The statistics of the whole tensor that are known without reading it."""

INTEGER = SIZES | {"counts", "min", "max", "mean"}
"""The statistics that integer and boolean tensors have."""

WHOLE = frozenset({"counts", "nans", "infs", "bytes", "numel"})
"""The statistics that are whole numbers."""

_ZERO_OF_NOTHING = WHOLE | {"sum", "norm"}
"""The statistics that are 0 for a tensor without elements; all others are NaN."""


class Bins(Section):
    """How a histogram counts: in so many bins of equal width, from the smallest to the largest finite element, or over
    a range."""

    bins: Annotated[int, Field(strict=True, ge=1, le=MOST_NUMBERS // 2 - 1)] = 64
    range: Literal["auto"] | tuple[Finite, Finite] = "auto"

    @model_validator(mode="after")
    def _ascends(self) -> Bins:
        if self.range != "auto" and self.range[0] >= self.range[1]:
            low, high = self.range
            raise ValueError(f"range: {low:g} is not below {high:g}")
        return self


class Distribution(Section):
    """What the last dimension holds: scores, which softmax makes probabilities, or probabilities."""

    of: Literal["scores", "probabilities"] = "scores"


Share = Annotated[float, Field(strict=True, ge=0, le=1)]


class Options(OneOf):
    """One statistic with its options.

    quantiles: the numbers below which these shares of the elements lie, as by torch.quantile
    histogram: how many elements lie in each bin, as by torch.histc
    counts:    how often each of the whole numbers from 0 up to this one, itself excluded, occurs, as by torch.bincount
    entropy:   of scores or of probabilities
    """

    quantiles: Annotated[tuple[Share, ...], Field(min_length=1)] | None = None
    histogram: Bins | None = None
    counts: Annotated[Count, Field(le=MOST_NUMBERS)] | None = None
    entropy: Distribution | None = None

    @model_validator(mode="after")
    def _is_given(self) -> Options:
        (name,) = self.model_fields_set
        if getattr(self, name) is None:
            raise ValueError(f"{name} is empty")
        return self

    def __str__(self) -> str:
        (name,) = self.model_fields_set
        given = getattr(self, name)
        if isinstance(given, Section):
            given = "{" + ", ".join(f"{key}: {value}" for key, value in given) + "}"
        return f"{name}: {list(given) if isinstance(given, tuple) else given}"


def kind_of(raw: Any) -> str:
    """Whether an item is a name or a mapping; a statistic that needs options is one, though written as a name."""
    meant = close(raw, [*get_args(Name), *Options.model_fields], 1) if isinstance(raw, str) else []
    needs_options = bool(meant) and meant[0] not in get_args(Name)
    return "a mapping" if needs_options or isinstance(raw, Mapping | Options) else "a name"


Item = Annotated[
    Annotated[Name, Kind("a name")] | Annotated[Options, Kind("a mapping")], Discriminator(kind_of)
]
"""An item of `of`; an error message is about the form that was given."""

Items = Annotated[
    OneOrMore[Item], BeforeValidator(lambda raw: [raw] if isinstance(raw, Mapping | Options) else raw)
]
"""One item, or a list of at least one."""


@dataclass(frozen=True, slots=True)
class Statistic:
    """A statistic with its options.

    key:      its name in a record
    define:   its definition
    length:   how many numbers there are for each row; None: one number that is not in a list
    in_graph: a compiled graph can compute it
    """

    key: str
    define: Callable[[Rows], Tensor]
    length: int | None = None
    in_graph: bool = True

    @property
    def is_number(self) -> bool:
        """Whether it is one number for each row."""
        return self.length is None

    def value(self, numbers: Sequence[Any]) -> Any:
        """What a record holds of a row: a number, a list, or for a histogram its counts and edges."""
        if self.key == "histogram":
            bins = len(numbers) // 2
            return {"counts": list(map(int, numbers[:bins])), "edges": list(numbers[bins:])}
        if self.key in WHOLE:
            numbers = list(map(int, numbers))
        return numbers[0] if self.is_number else list(numbers)

    def of_nothing(self) -> Any:
        """What a record holds of a row without elements."""
        return self.value(self.numbers_of_nothing())

    def numbers_of_nothing(self) -> list[float]:
        """The numbers of a row without elements."""
        count = self.length or 1
        if self.key == "histogram":
            bins = count // 2
            return [0.0] * bins + [math.nan] * (bins + 1)
        number = 0.0 if self.key in _ZERO_OF_NOTHING else math.nan
        return [number] * count


def statistic(item: str | Options) -> Statistic:
    """The statistic that an item of `of` names."""
    if isinstance(item, str):
        return Statistic(item, lambda rows: rows[item])
    if item.quantiles is not None:
        return _quantiles(item.quantiles)
    if item.histogram is not None:
        return _histogram(item.histogram)
    if item.counts is not None:
        return _counts(item.counts)
    if item.entropy == Distribution(of="probabilities"):
        return Statistic("entropy", _entropy_of_probabilities)
    return Statistic("entropy", _entropy_of_scores)


def statistics(of: Iterable[str | Options]) -> tuple[Statistic, ...]:
    """The statistics that are named.

    ValueError if two of them have the same name in a record, or if they are more numbers than a record holds.
    """
    found = tuple(map(statistic, of))
    keys = [each.key for each in found]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"{key} is named twice, and a record holds it once: give one of the two")
    numbers = count_of(found)
    if numbers > MOST_NUMBERS:
        raise ValueError(f"these are {numbers:,} numbers, and a record has at most {MOST_NUMBERS:,}")
    return found


def count_of(of: Iterable[Statistic]) -> int:
    """How many numbers the statistics of a row are."""
    return sum(each.length or 1 for each in of)


def count_along(dim: int | None, each: int, shape: Sequence[int]) -> int | None:
    """How many numbers there are of a tensor, if there are so many for each index of the dimension that is kept.

    None: the size of the dimension is known only when a graph runs, or the tensor does not have the dimension.
    """
    if dim is None:
        return each
    if not -len(shape) <= dim < len(shape):
        return None
    return shape[dim] * each if isinstance(shape[dim], int) else None


def require_dim(dim: int, shape: Sequence[int], of: Sequence[Statistic]) -> None:
    """ValueError if a tensor of this shape has no dimension `dim`, or too many places in it for a record."""
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"dim: {dim} is not a dimension of the tensor, whose shape is {list(shape)}")
    is_last = dim % len(shape) == len(shape) - 1
    if is_last and any(each.key == "entropy" for each in of):
        raise ValueError(
            f"dim: {dim} keeps the last dimension, and entropy is that of the numbers along it: keep another "
            "dimension, or leave entropy out"
        )
    numbers = shape[dim] * count_of(of)
    if numbers > MOST_NUMBERS:
        raise ValueError(
            f"dim: {dim} has {shape[dim]:,} places, and of each of them `of` has {counted(count_of(of), 'number')}: "
            f"{numbers:,} in all, where a record has at most {MOST_NUMBERS:,}; name fewer statistics, or a part of "
            "the tensor with `index`"
        )


def require_dtype(x: Tensor, of: Sequence[Statistic]) -> None:
    """Absent if tensors of this dtype do not have one of the statistics."""
    keys = [each.key for each in of]
    if not is_integer(x):
        if "counts" in keys:
            raise Absent(
                f"counts is of integers, and the tensor is {_name_of(x)}: `histogram` counts other numbers, in bins"
            )
        return
    others = [key for key in keys if key not in INTEGER]
    if others:
        raise Absent(
            f"the tensor is {_name_of(x)}, and of integers there are counts, min, max and mean, not "
            f"{listed(others)}: name some of these in `of`, or select another module or `target`"
        )


def _name_of(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


# ---- rows and their statistics -------------------------------------------------------------------------------------


def _apart(rows: Rows) -> tuple[Tensor, Tensor]:
    """The first element of each row in float64, as a finite number, and what all elements differ from it."""
    first = rows.places
    for dim in (rows.dims,) if isinstance(rows.dims, int) else rows.dims:
        first = first.narrow(dim, 0, 1)
    first = first.clamp(-LARGEST, LARGEST).double()
    return first, rows.places.double() - first


def _total(rows: Rows) -> Tensor:
    return rows["apart"][1].sum(rows.dims)


def _squares(rows: Rows) -> Tensor:
    return rows["apart"][1].square().sum(rows.dims)


def _center(rows: Rows) -> Tensor:
    """The mean, in float64."""
    return rows["first"] + rows["total"] / rows.n


def _moments(rows: Rows) -> tuple[Tensor, Tensor]:
    """Variance and sum of squares, in float64: two sums, which a compiled graph computes in one loop.

    The sums are of differences from the first element, so that a large mean does not hide a small variance.
    """
    total = rows["total"]
    squares = rows["squares"]
    first = rows["first"]
    variance = (squares - total * total / rows.n).clamp(min=0) / (rows.n - 1)
    around_zero = squares + 2 * first * total + rows.n * first.square()
    return variance, around_zero.where(squares < math.inf, squares)


def _mean(rows: Rows) -> Tensor:
    import torch

    if rows.are_traced:
        return rows["center"]
    if rows.flat.is_floating_point():
        return rows.flat.mean(-1)
    return rows.flat.mean(-1, dtype=torch.float64)


def _sum(rows: Rows) -> Tensor:
    if rows.are_traced:
        return rows["center"] * rows.n
    return rows.places.sum(rows.dims)


def _extremes(rows: Rows) -> tuple[Tensor, Tensor]:
    """The smallest and the largest elements; `aminmax` of one dimension takes 20 times as long as of the whole."""
    if rows.flat.dim() == 1:
        least, largest = rows.flat.aminmax()
        return least, largest
    import torch

    if torch.compiler.is_compiling() and rows.places.is_floating_point() and not isinstance(rows.dims, int):
        return extremes_in_graph(rows.places, rows.dims)
    return rows.places.amin(rows.dims), rows.places.amax(rows.dims)


def extremes_in_graph(x: Tensor, dims: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The smallest and the largest elements along dimensions, in a form for which a compiler writes fast code.

    The smallest is found in -x, because the compiler fuses `amax` but not `amin`: where a layer reads the tensor too,
    it would keep the layer's results for the backward pass instead of computing them again.
    """
    return -largest_in_graph(-x, dims), largest_in_graph(x, dims)


def largest_in_graph(x: Tensor, dims: Sequence[int]) -> Tensor:
    """The largest elements; on the CPU first along the channels of images, which lie side by side after a convolution.

    So they are computed in the loops of the layers that read the tensor.
    """
    if x.is_cpu and len(dims) > 3:
        x = x.amax(dims[1], keepdim=True)
    return x.amax(tuple(dims))


def _count(rows: Rows, x: Tensor) -> Tensor:
    """How many elements of each row are not 0; for a single one torch has a faster function. x: like rows.places"""
    import torch

    if x.dim() == 1:
        return x.count_nonzero()
    is_counted = x if x.dtype is torch.bool else x != 0  # a compiler writes slow loops for x.bool()
    if rows.are_traced and rows.n < MOST_EXACT:
        return is_counted.float().sum(rows.dims)
    return is_counted.sum(rows.dims)


def _unknown(rows: Rows) -> Tensor:
    """NaN, the spread of single elements, about which torch warns."""
    return rows.flat.sum(-1) * math.nan


def _variance(rows: Rows) -> Tensor:
    if rows.are_traced:
        return rows["moments"][0]
    return rows.flat.var(-1) if rows.n > 1 else _unknown(rows)


def _deviation(rows: Rows) -> Tensor:
    if rows.are_traced:
        return rows["moments"][0].sqrt()
    return rows.flat.std(-1) if rows.n > 1 else _unknown(rows)  # the root of var may be out of range


def _norm(rows: Rows) -> Tensor:
    import torch

    if rows.are_traced:
        return rows["moments"][1].float().sqrt()
    if rows.flat.is_cpu:  # where torch sums a long row in pairs, and its norm in few accumulators
        if rows.flat.numel() == rows.n and not torch.compiler.is_compiling():  # one row: memory is read once
            flat = rows.flat.flatten()
            if rows.n <= MOST_SQUARES:
                total = flat.dot(flat)
            else:
                total = torch.stack([part.dot(part) for part in flat.split(MOST_SQUARES)]).sum()
            return total.sqrt().reshape(rows.flat.shape[:-1])
        return rows.flat.square().sum(-1).sqrt()
    return torch.linalg.vector_norm(rows.flat, dim=-1)


def _dynamic_range(rows: Rows) -> Tensor:
    """log2(largest |x| / smallest non-zero |x|); NaN where all elements are 0."""
    size = rows.flat.abs()
    least = size.masked_fill(size == 0, math.inf).amin(-1)
    largest = size.amax(-1)
    return (largest.log2() - least.log2()).masked_fill(largest == 0, math.nan)


def _underflows(rows: Rows) -> Tensor:
    """The share of the non-zero elements that are below the smallest normal number of the tensor's dtype."""
    import torch

    size = rows.flat.abs()
    others = size != 0
    below = others & (size < torch.finfo(rows.kind).tiny)
    return below.sum(-1) / others.sum(-1)


def _entropy(rows: Rows, shares: Tensor) -> Tensor:
    """The mean over all places of the entropy along the last dimension. shares: probabilities, like rows.x"""
    import torch

    of_places = torch.special.entr(shares).sum(-1)
    return of_places.reshape(*rows.flat.shape[:-1], -1).mean(-1)


def _constant(rows: Rows, number: int) -> Tensor:
    """The same number for each row, exact up to 2**53."""
    import torch

    return rows.flat.new_full(rows.flat.shape[:-1], number, dtype=torch.float64)


def _entropy_of_scores(rows: Rows) -> Tensor:
    return _entropy(rows, rows.x.softmax(-1))


def _entropy_of_probabilities(rows: Rows) -> Tensor:
    return _entropy(rows, rows.x / rows.x.sum(-1, keepdim=True))


DEFINITIONS: Mapping[str, Callable[[Rows], Any]] = {
    "mean": _mean,
    "apart": _apart,
    "first": lambda rows: rows["apart"][0].squeeze(rows.dims),
    "total": _total,
    "squares": _squares,
    "center": _center,
    "moments": _moments,
    "var": _variance,
    "std": _deviation,
    "extremes": _extremes,
    "negative_max": lambda rows: (-rows.places).amax(rows.dims),
    "min": lambda rows: rows["extremes"][0],
    "max": lambda rows: rows["extremes"][1],
    "norm": _norm,
    "abs_mean": lambda rows: rows.places.abs().mean(rows.dims),
    "abs_max": lambda rows: rows["max"].maximum(-rows["min"]),
    "sum": _sum,
    "nonzeros": lambda rows: _count(rows, rows.places),
    "zeros": lambda rows: (rows.n - rows["nonzeros"]) / rows.n,
    "nans": lambda rows: _count(rows, rows.places.isnan()),
    "infs": lambda rows: _count(rows, rows.places.isinf()),
    "entropy": _entropy_of_scores,
    "dynamic_range": _dynamic_range,
    "underflows": _underflows,
    "numel": lambda rows: _constant(rows, rows.x.numel()),
    "bytes": lambda rows: _constant(rows, rows.x.numel() * rows.kind.itemsize),
}
"""Rows [..., n] -> [...], and what these share."""


class Rows(dict[str, Any]):
    """Rows of numbers and their statistics, each of which is computed once, when somebody asks for it.

    x:     [..., *shape], floating-point numbers in which torch computes, or integers
    flat:  [..., n], the elements of each row; without a dimension in front the whole tensor is one row
    places: the same numbers, whose rows are reduced over `dims`: `flat`, but in a compiled graph as they lie in memory,
           because a compiler puts those of a convolution in another order
    n:     how many elements a row has: an integer, or a tensor [...]
    kind:  the dtype of the tensor from which they come
    definitions: of each statistic
    """

    definitions: ClassVar[Mapping[str, Callable[[Rows], Any]]] = DEFINITIONS
    x: Tensor
    flat: Tensor
    places: Tensor
    dims: int | tuple[int, ...] = -1
    n: Any
    kind: dtype

    def __init__(self, x: Tensor, flat: Tensor, kind: dtype) -> None:
        super().__init__()
        self.x = x
        self.flat = flat
        self.places = flat
        self.n = flat.shape[-1]
        self.kind = kind

    @property
    def are_traced(self) -> bool:
        """Whether sums in float64 are faster than a loop for each statistic: on the CPU if a compiler fuses them."""
        import torch

        return self.flat.is_cpu and self.flat.dtype is torch.float32 and torch.compiler.is_compiling()

    def __missing__(self, name: str) -> Any:
        value = self.definitions[name](self)
        self[name] = value
        return value


def rows_of(x: Tensor, dim: int | None = None) -> Rows:
    """The rows [R, ...] of a tensor: itself as one row, or one for each index of the dimension that is kept."""
    import torch

    numbers = numbers_in(x)
    shaped = numbers.unsqueeze(0) if dim is None else numbers.movedim(dim, 0)
    places = shaped
    is_compiled = torch.compiler.is_compiling()
    if dim is None and not is_compiled:
        places = in_memory_order(numbers).unsqueeze(0)
    if places.dim() == 1:
        places = places.unsqueeze(1)
    rows = Rows(shaped, places.flatten(1), x.dtype)
    if is_compiled:
        rows.places = places
        rows.dims = tuple(range(1, places.dim()))
    return rows


def in_memory_order(x: Tensor) -> Tensor:
    """A view with the dimensions in the order in which they lie in memory, which becomes flat without a copy."""
    if x.is_contiguous():
        return x
    return x.permute(sorted(range(x.dim()), key=x.stride, reverse=True))


def sizes_of(x: Tensor) -> dict[str, int]:
    """`numel` and `bytes`."""
    return {"numel": x.numel(), "bytes": x.numel() * x.element_size()}


def numbers_in(x: Tensor) -> Tensor:
    """The elements as numbers in which torch computes: those of small dtypes in float32, complex ones by their absolute
    value, integers as integers."""
    import torch

    if x.is_quantized:
        return x.dequantize()
    if x.is_complex():
        x = x.abs()
    if x.is_floating_point():
        return x if x.dtype is torch.float64 else x.float()
    if x.dtype is torch.bool:
        return x.to(torch.uint8)
    if x.dtype is torch.uint64:
        return x.double()
    return x.long() if x.dtype in (torch.uint16, torch.uint32) else x


def numbers_of(rows: Rows, of: Sequence[Statistic]) -> Tensor:
    """[R, k] float64: the numbers of all statistics side by side, in their order."""
    import torch

    return torch.cat([column.reshape(len(rows.flat), -1) for column in columns_of(rows, of)], dim=1)


def columns_of(rows: Rows, of: Sequence[Statistic]) -> list[Tensor]:
    """The numbers of each statistic, one row after the other: [R * length] float64; it can be traced."""
    return [each.define(rows).double().flatten() for each in of]


# ---- statistics with options ---------------------------------------------------------------------------------------


def _quantiles(shares: Sequence[float]) -> Statistic:
    """As by torch.quantile, which refuses more than 16 million elements."""

    def define(rows: Rows) -> Tensor:
        import torch

        ascending = rows.flat.sort(-1).values
        found: list[Tensor] = []
        for share in shares:
            place = share * (rows.n - 1)
            below = math.floor(place)
            low = ascending[..., below]
            high = ascending[..., math.ceil(place)]
            between = low.lerp(high, place - below)  # NaN between two infinities
            found.append(torch.where(low == high, low, between))
        last = ascending[..., -1:]  # NaN comes last
        return torch.stack(found, -1).where(~last.isnan(), last)

    return Statistic("quantiles", define, len(shares), in_graph=False)


def _histogram(wanted: Bins) -> Statistic:
    bins = wanted.bins

    def define(rows: Rows) -> Tensor:
        """[..., 2 * bins + 1]: the counts, then the edges."""
        import torch

        flat = rows.flat
        low, high = _range(flat, wanted.range)
        steps = torch.arange(bins + 1, dtype=torch.float64, device=flat.device) / bins
        edges = (low.double() * (1 - steps) + high.double() * steps).to(flat.dtype)
        inside = flat.isfinite() & (flat >= low) & (flat <= high)
        counts = _counted(_bins_of(flat, edges).where(inside, bins), bins)
        return torch.cat([counts.double(), edges.double()], -1)

    return Statistic("histogram", define, 2 * bins + 1)


def _bins_of(flat: Tensor, edges: Tensor) -> Tensor:
    """[..., n] int64: the bin of each element, by its part of the range; as the rounded edges say if it is near one."""
    quarters = edges.double() / 4  # so that no difference is out of range
    low = quarters[..., :1]
    part = (flat.double() / 4 - low) / (quarters[..., -1:] - low)
    last = edges.shape[-1] - 2
    bins = (part * (last + 1)).long().clamp(0, last)
    bins = bins - (flat < edges.gather(-1, bins)).long()
    bins = bins + (flat >= edges.gather(-1, bins + 1)).long()
    return bins.clamp(0, last)


def _range(flat: Tensor, wanted: Any) -> tuple[Tensor, Tensor]:
    """[..., 1] each: the ends of a histogram. Without a finite element they are infinite, and the edges NaN."""
    import torch

    if wanted != "auto":
        first = flat[..., :1]
        return torch.full_like(first, wanted[0]), torch.full_like(first, wanted[1])
    finite = flat.isfinite()
    low = flat.where(finite, math.inf).amin(-1, keepdim=True)
    high = flat.where(finite, -math.inf).amax(-1, keepdim=True)
    is_point = (low == high).to(flat.dtype)  # which lies in the middle, as by torch.histc
    return low - is_point, high + is_point


def _counts(count: int) -> Statistic:
    def define(rows: Rows) -> Tensor:
        whole = rows.flat.long()
        inside = (whole >= 0) & (whole < count)
        return _counted(whole.where(inside, count), count)

    return Statistic("counts", define, count)


def _counted(places: Tensor, count: int) -> Tensor:
    """[..., n] places from 0 to `count` -> [..., count] int64: how often each occurs, but for the last one."""
    import torch

    zeros = torch.zeros(*places.shape[:-1], count + 1, dtype=torch.int64, device=places.device)
    ones = torch.ones((), dtype=torch.int64, device=places.device).expand_as(places)
    return zeros.scatter_add(-1, places, ones)[..., :count]
