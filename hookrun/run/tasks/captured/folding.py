"""What a fold accumulates of captured rows, as the action `fold` does of the rows that its hook sees."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from hookrun.engine.actions.fold import FoldKeys
from hookrun.engine.plan.table import size
from hookrun.engine.values.folded import SPLITS, Folded
from hookrun.engine.values.folding import MOST_BYTES, Folding, SeenRows
from hookrun.errors import HookrunError
from hookrun.store.captures.read import StoredCapture

_READ_BYTES = 2**24
"""The most bytes of rows that are read at once; at least one row is."""


def folded(keys: FoldKeys, capture: StoredCapture, labels: Tensor | None) -> Folded:
    """What the keys ask for of the rows of a capture.

    labels: [rows] int64, with `by: label`

    HookrunError if there are no rows of floating-point numbers, or the keys do not fit them.
    """
    if not len(capture) or not capture.row_bytes or not capture.dtype.is_floating_point:
        raise HookrunError(f"{capture!r} has no floating-point numbers")
    site = _CapturedRows(capture, labels)
    add = keys.build(site)
    count = max(1, _READ_BYTES // capture.row_bytes)
    try:
        for start in range(0, len(capture), count):
            site.rows = slice(start, start + count)
            add(capture[site.rows])
    except ValueError as error:
        raise HookrunError(f"{capture.label}: {error}") from error
    result = site.fold.result()
    assert result is not None  # there are rows
    return result


class _CapturedRows:
    """The site of a fold whose rows were captured before.

    rows: those that are accumulated now
    """

    fold: Folding
    rows: slice

    def __init__(self, capture: StoredCapture, labels: Tensor | None) -> None:
        self.keys = capture.sample_ids * len(SPLITS) + capture.split_numbers + 1  # as `keys_of` makes them
        self.positions = capture.positions
        self.labels = labels

    def register_fold(self, folding: Folding) -> None:
        self.fold = folding

    def channels(self, rows: Tensor, dim: int | None) -> tuple[int, str]:
        dims = rows.dim()
        could = [place for place in range(1, dims) if dim in (None, place, place - dims)]
        if len(could) != 1:
            places = " or ".join(map(str, range(1, dims))) or "none (use per: element)"
            shape = ", ".join(map(str, rows.shape[1:]))
            raise ValueError(f"the dimension `dim` of channels of a capture [rows, {shape}] may be {places}")
        return could[0], ""

    def accumulate(self, values: Tensor, units: Sequence[int], places: Sequence[int], text: str) -> None:
        needed = self.fold.wanted.size(prod(units))
        if needed > MOST_BYTES:
            raise ValueError(
                f"it would hold {size(needed)}, at most {size(MOST_BYTES)}: ask for less in `of`"
            )
        positions = self.positions[self.rows]
        labels = None if self.labels is None else self.labels[self.rows]
        are_tokens = bool((positions >= 0).all())
        seen = SeenRows(values, self.keys[self.rows], positions if are_tokens else None)
        self.fold.add(seen, units, places, labels)
