"""Statistics of large tensors in compiled graphs on the CPU, by lanes.

A compiler makes one loop in one thread of a sum over a whole tensor. Therefore the tensor is parted into some hundred
lanes of equal length, whose statistics are loops over vectors in several threads. In a second step those of the lanes
become those of the tensor, for several tensors at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hookrun.engine.actions.statistics import DEFINITIONS, Rows, Statistic

if TYPE_CHECKING:
    from torch import Tensor

LEAST_ELEMENTS = 2048
"""Smaller tensors are measured as a whole."""

MOST_LANES = 4096
"""A tensor with more of them is measured as a whole: its second step would take too long."""

WIDTH = 16
"""Lanes that lie side by side in memory: a vector of the processor."""

CHUNKS = 8
"""Parts of a tensor that threads share."""

_AROUND_FIRST = ("first", "total", "squares")

NEEDS: Mapping[str, tuple[str, ...]] = {
    "mean": ("first", "total"),
    "sum": ("first", "total"),
    "std": _AROUND_FIRST,
    "var": _AROUND_FIRST,
    "norm": _AROUND_FIRST,
    "min": ("negative_max",),
    "max": ("max",),
    "abs_max": ("negative_max", "max"),
    "abs_mean": ("abs_mean",),
    "zeros": ("nonzeros",),
    "nans": ("nans",),
    "infs": ("infs",),
}
"""Statistic of a tensor -> the statistics of its lanes that it follows from; the others are measured as a whole."""

EXTREMES = ("negative_max", "max")
"""What the smallest and the largest elements follow from, see `extremes_in_graph`."""

LaneNumbers = Mapping[str, "Tensor"]
"""Statistics of the lanes of a tensor, which are as many numbers as it has lanes."""


def needs_of(wanted: Iterable[Statistic]) -> tuple[str, ...]:
    """The statistics of lanes from which those that are wanted follow; none: they do not follow from lanes."""
    names: dict[str, None] = {}
    for each in wanted:
        if each.key not in NEEDS:
            return ()
        names.update(dict.fromkeys(NEEDS[each.key]))
    return tuple(names)


@dataclass(frozen=True, slots=True)
class Lanes:
    """How a tensor is parted into lanes.

    view: its shape with dimensions split
    dims: those dimensions along which the elements of a lane lie
    """

    view: tuple[int, ...]
    dims: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of a statistic of the lanes."""
        return tuple(size for dim, size in enumerate(self.view) if dim not in self.dims)

    @property
    def count(self) -> int:
        """How many lanes there are."""
        return math.prod(self.shape)

    @property
    def length(self) -> int:
        """How many elements a lane has."""
        return math.prod(self.view) // self.count

    def numbers(self, x: Tensor, names: Iterable[str]) -> LaneNumbers:
        """Statistics of the lanes of a tensor."""
        rows = Rows(x, x.view(self.view), x.dtype)
        rows.dims = self.dims
        rows.n = self.length
        return {name: rows[name] for name in names}


def lanes_of(x: Tensor, names: Sequence[str]) -> Lanes | None:
    """The lanes of a tensor for some statistics; None: it is measured as a whole."""
    import torch

    if not (x.is_cpu and x.dtype is torch.float32 and all(isinstance(size, int) for size in x.shape)):
        return None
    if x.dim() > 3 and set(names).issubset(EXTREMES):
        return None  # a compiler computes them in the loops of the next layer
    lanes = _lanes(tuple(x.shape)) if x.numel() >= LEAST_ELEMENTS else None
    if lanes is None or not 1 < lanes.count <= MOST_LANES or lanes.length < WIDTH:
        return None
    return lanes


def _lanes(shape: tuple[int, ...]) -> Lanes:
    """Images by sample and channel, in whichever order they lie in memory; others by vectors of the last dimension."""
    if len(shape) > 3:
        return Lanes(shape, tuple(range(2, len(shape))))
    *outer, last = shape
    if last % WIDTH:
        return Lanes(shape, (len(outer),))
    vectors = last // WIDTH
    if outer and outer[0] % CHUNKS == 0:
        view = (CHUNKS, outer[0] // CHUNKS, *outer[1:], vectors, WIDTH)
    elif outer:
        view = (*outer, vectors, WIDTH)
    elif vectors % CHUNKS == 0:
        view = (CHUNKS, vectors // CHUNKS, WIDTH)
    else:
        view = (1, vectors, WIDTH)
    return Lanes(view, tuple(range(1, len(view) - 1)))


class TensorsOfLanes(Rows):
    """Tensors that are known by statistics of their lanes: a row each.

    lanes: statistic -> those of the lanes, [R, lanes] float64
    length: [R], how many elements a lane of each tensor has
    """

    def __init__(self, numbers: Sequence[LaneNumbers], lengths: Sequence[int]) -> None:
        import torch

        dict.__init__(self)
        self.lanes: dict[str, Tensor] = {}
        count = next(iter(numbers[0].values())).numel()
        for name in numbers[0]:
            together = torch.stack([each[name] for each in numbers])
            self.lanes[name] = together.flatten(1).double()
        self.length = torch.tensor(lengths, dtype=torch.float64)
        self.n = self.length * count

    definitions: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        **DEFINITIONS,
        "center": lambda rows: _center(rows),
        "moments": lambda rows: _moments(rows),
        "min": lambda rows: -rows.lanes["negative_max"].amax(-1),
        "max": lambda rows: rows.lanes["max"].amax(-1),
        "abs_mean": lambda rows: rows.lanes["abs_mean"].mean(-1),
        "nonzeros": lambda rows: rows.lanes["nonzeros"].sum(-1),
        "nans": lambda rows: rows.lanes["nans"].sum(-1),
        "infs": lambda rows: rows.lanes["infs"].sum(-1),
    }
    are_traced = True


def _center(rows: TensorsOfLanes) -> Tensor:
    """The mean."""
    return (rows.lanes["first"] + rows.lanes["total"] / rows.length.unsqueeze(-1)).mean(-1)


def _moments(rows: TensorsOfLanes) -> tuple[Tensor, Tensor]:
    """Variance and sum of squares."""
    spread = _squares_around(rows, rows["center"]).clamp(min=0)
    around_zero = _squares_around(rows, rows.length * 0)
    infinite = rows.lanes["squares"].sum(-1)
    return spread / (rows.n - 1), around_zero.where(infinite < math.inf, infinite)


def _squares_around(rows: TensorsOfLanes, center: Tensor) -> Tensor:
    """The sum of squared differences from a number, from those around the first element of each lane."""
    apart = rows.lanes["first"] - center.unsqueeze(-1)
    of_lanes = rows.lanes["squares"] + 2 * apart * rows.lanes["total"]
    return (of_lanes + rows.length.unsqueeze(-1) * apart.square()).sum(-1)
