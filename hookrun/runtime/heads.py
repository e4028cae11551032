"""The part of a tensor that `heads` selects: in a last dimension of size heads × width, or in a head dimension."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hookrun.index import Index, Item
from hookrun.plan.heads import HeadCount
from hookrun.runtime.part import Part
from hookrun.spec.heads import Heads


class HeadsPart:
    """Some heads of a tensor. A last dimension of size heads × width is split into two: [..., heads, width].

    not_dim: the sequence dimension, which is never taken as the head dimension
    """

    def __init__(self, heads: Heads, counted: HeadCount, not_dim: int) -> None:
        self._heads, self._counted, self._not_dim = heads, counted, not_dim
        self._parts = dict[tuple[int, int | None], Part]()
        self._seen = dict[int, int | None]()

    def of(self, tensor: Tensor) -> Tensor:
        """A copy of the heads."""
        dim, count = self._place(tensor)
        return self._part(tensor.dim(), dim).of(_apart(tensor, dim, count))

    def put(self, tensor: Tensor, new: Tensor) -> Tensor:
        """A copy of the tensor in which `new` replaces the heads."""
        dim, count = self._place(tensor)
        changed = self._part(tensor.dim(), dim).put(_apart(tensor, dim, count), new)
        return changed if dim is not None else changed.flatten(-2)

    def nothing_of(self, tensor: Tensor) -> bool:
        """Never: there is at least one head."""
        return False

    def keeps_samples(self, dims: int) -> bool:
        """Always: heads are not rows."""
        return True

    def _part(self, dims: int, dim: int | None) -> Part:
        if (found := self._parts.get((dims, dim))) is None:
            picked = self._heads.pick
            items: tuple[Item, ...]
            items = (..., picked, slice(None)) if dim is None else (*[slice(None)] * dim, picked)
            found = self._parts[dims, dim] = Part(Index(f"heads {list(picked)}", items))
        return found

    def _place(self, tensor: Tensor) -> tuple[int | None, int]:
        """The head dimension, or None if the last dimension holds heads × width; and the number of heads.

        Raises ValueError if the tensor does not have the heads.
        """
        dims, shape = tensor.dim(), tensor.shape
        dim = self._heads.dim if self._heads.dim is not None else self._dim(shape)
        counts = self._counted.counts
        if dim is None:
            return None, self._in_last(shape)
        if dim >= dims or shape[dim] not in counts:
            raise ValueError(
                f"heads: dimension {dim} of shape {list(shape)} is not a dimension of {_text(counts)} heads"
            )
        return dim, shape[dim]

    def _dim(self, shape: Sequence[int]) -> int | None:
        dims = len(shape)
        if dims < 4:
            return None
        found = [
            dim for dim in range(1, dims - 1) if shape[dim] in self._counted.counts and dim != self._not_dim
        ]
        if len(found) == 1:
            self._seen[dims] = found[0]
        elif found and self._seen.get(dims) in found:
            return self._seen[dims]
        if len(found) > 1:
            raise ValueError(
                f"heads: dimensions {found} of shape {list(shape)} could all be the head dimension: select one with "
                f"heads: {{pick: {list(self._heads.pick)}, dim: {found[0]}}}"
            )
        return found[0] if found else None

    def _in_last(self, shape: Sequence[int]) -> int:
        counted, size = self._counted, shape[-1] if shape else 0
        fits = [count for count in counted.counts if size and size % count == 0]
        if counted.width is not None:
            fits = [count for count in fits if size == count * counted.width]
        if not fits:
            width = f" of width {counted.width}" if counted.width is not None else ""
            raise ValueError(
                f"heads: the last dimension of shape {list(shape)} does not hold {_text(counted.counts)} heads{width}, "
                "and no other dimension has that size; hook the input of the output projection, or say how many "
                "heads this tensor has: heads: {count: …, pick: …}"
            )
        if (wrong := self._heads.misfit(fits[0])) is not None:
            raise ValueError(f"heads: {wrong}")
        return fits[0]


def _apart(tensor: Tensor, dim: int | None, count: int) -> Tensor:
    return tensor if dim is not None else tensor.unflatten(-1, (count, -1))


def _text(counts: Sequence[int]) -> str:
    return " or ".join(map(str, counts))
