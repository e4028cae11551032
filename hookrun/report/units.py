"""Units that tell nothing: dead, saturated, or the same for every input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Class -> the ends of its range.
_RANGES = {
    "Sigmoid": (0.0, 1.0),
    "Hardsigmoid": (0.0, 1.0),
    "Tanh": (-1.0, 1.0),
    "Hardtanh": (-1.0, 1.0),
    "Softsign": (-1.0, 1.0),
    "ReLU6": (None, 6.0),  # its other end is where it is meant to be
}
_NEAR = 0.01
_OFTEN = 0.95
_FEWEST_ROWS = 8
_SHOWN = 24


@dataclass(frozen=True)
class Units:
    """Units of one kind among those looked at.

    what: ``dead``, ``saturated`` or ``constant``
    """

    what: str
    meaning: str
    which: tuple[int, ...]
    total: int
    kind: str

    @property
    def shown(self) -> str:
        """Their numbers, as far as there is room."""
        more = f" and {len(self.which) - _SHOWN} more" if len(self.which) > _SHOWN else ""
        return ", ".join(map(str, self.which[:_SHOWN])) + more


def idle_units(rows: Tensor, module_class: str) -> list[Units]:
    """Judge the units of [rows, ...]: channels of images, else the elements of the last dimension."""
    if len(rows) < _FEWEST_ROWS or rows.dim() < 2 or not rows.numel():
        return []
    is_image = rows.dim() == 4
    kind = "channel" if is_image else "unit"
    by_unit = (rows.movedim(1, -1) if is_image else rows).flatten(0, -2)
    total, looked = by_unit.shape[1], f"in the {len(rows)} rows looked at"
    low, high = by_unit.amin(0), by_unit.amax(0)
    dead = (low == 0) & (high == 0)
    found = [Units("dead", f"exactly 0 {looked}", _numbers(dead), total, kind)]
    ends = _RANGES.get(module_class)
    if ends is not None:
        near = _near_an_end(by_unit, *ends)
        meaning = f"within 1 % of an end of its range in {_OFTEN:.0%} of the values {looked}"
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
