"""Dead units: channels or elements that are always zero, saturated, or the same for every input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hookrun.errors import listed

# Class -> the ends of its range.
_RANGES = {
    "Sigmoid": (0.0, 1.0),
    "Hardsigmoid": (0.0, 1.0),
    "Tanh": (-1.0, 1.0),
    "Hardtanh": (-1.0, 1.0),
    "Softsign": (-1.0, 1.0),
    "ReLU6": (None, 6.0),  # at 0 it is inactive, not saturated
}
_NEAR = 0.01
_OFTEN = 0.95
_FEWEST_ROWS = 8
_SHOWN = 24


@dataclass(frozen=True)
class Units:
    """Idle units of one kind.

    what:    ``dead``, ``saturated`` or ``constant``
    meaning: how that was measured
    which:   their indices, among `total`
    kind:    ``unit`` or ``channel``
    """

    what: str
    meaning: str
    which: tuple[int, ...]
    total: int
    kind: str

    @property
    def shown(self) -> str:
        """The first of their indices."""
        return listed(map(str, self.which), _SHOWN)


def idle_units(rows: Tensor, module_class: str) -> list[Units]:
    """The idle units of rows [rows, ...]: channels of images, else elements of the last dimension.

    Empty for fewer than 8 rows, which are not enough to tell. Saturation is tested if the class has a bounded range.
    """
    if len(rows) < _FEWEST_ROWS or rows.dim() < 2 or not rows.numel():
        return []
    is_image = rows.dim() == 4
    kind = "channel" if is_image else "unit"
    by_unit = (rows.movedim(1, -1) if is_image else rows).flatten(0, -2)
    total, looked = by_unit.shape[1], f"in the {len(rows)} rows examined"
    low, high = by_unit.amin(0), by_unit.amax(0)
    dead = (low == 0) & (high == 0)
    found = [Units("dead", f"exactly 0 {looked}", _numbers(dead), total, kind)]
    ends = _RANGES.get(module_class)
    if ends is not None:
        near = _near_an_end(by_unit, *ends)
        meaning = f"within 1 % of a bound of the range in {_OFTEN:.0%} of the values {looked}"
        found.append(Units("saturated", meaning, _numbers(near >= _OFTEN), total, kind))
    same = (low == high) & ~dead
    found.append(Units("constant", f"the same value {looked}", _numbers(same), total, kind))
    return [units for units in found if units.which]


def _near_an_end(by_unit: Tensor, low: float | None, high: float) -> Tensor:
    width = high - (low if low is not None else 0.0)
    near = by_unit >= high - _NEAR * width
    if low is not None:
        near |= by_unit <= low + _NEAR * width
    return near.float().mean(0)


def _numbers(mask: Tensor) -> tuple[int, ...]:
    chosen: Sequence[int] = torch.nonzero(mask).flatten().tolist()
    return tuple(chosen)
