"""The part of a tensor that `index` selects: reading it and writing it back; and parts of parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hookrun.actions.tensors import holds_data
from hookrun.index import Index


class TensorPart(Protocol):
    """The part of each tensor that a hook acts on."""

    def of(self, tensor: Tensor) -> Tensor:
        """The part of this tensor."""

    def put(self, tensor: Tensor, new: Tensor) -> Tensor:
        """A copy of the tensor in which `new` replaces the part."""

    def nothing_of(self, tensor: Tensor) -> bool:
        """Whether the part of this tensor is empty, so that there is nothing to act on."""

    def keeps_samples(self, dims: int) -> bool:
        """Whether the part of a tensor with `dims` dimensions has a row for each row of the tensor."""


class PartOfPart:
    """The inner part of an outer part."""

    def __init__(self, outer: TensorPart, inner: TensorPart) -> None:
        self._outer, self._inner = outer, inner

    def of(self, tensor: Tensor) -> Tensor:
        """The inner part of the tensor's outer part."""
        return self._inner.of(self._outer.of(tensor))

    def put(self, tensor: Tensor, new: Tensor) -> Tensor:
        """A copy of the tensor in which `new` replaces the inner part."""
        return self._outer.put(tensor, self._inner.put(self._outer.of(tensor), new))

    def nothing_of(self, tensor: Tensor) -> bool:
        """Whether either part is empty."""
        return self._outer.nothing_of(tensor) or self._inner.nothing_of(self._outer.of(tensor))

    def keeps_samples(self, dims: int) -> bool:
        """Whether both parts have a row for each row of the tensor."""
        return self._outer.keeps_samples(dims) and self._inner.keeps_samples(dims)


class Part:
    """The part of a tensor that an index selects.

    in_order: the rows of the first dimension, which are samples, must stay in their order
    """

    def __init__(self, index: Index, *, in_order: bool = False) -> None:
        self._items = index.items
        self._numbers = index.positions
        self._in_order = in_order
        self._fitting = set[tuple[int, int]]()
        self._on = dict[torch.device, Tensor]()
        if self._numbers is not None:
            place = self._items.index(self._numbers)
            self._after_ellipsis = ... in self._items[:place]
            self._from_end = len(self._items) - place
            self._place = place

    def of(self, tensor: Tensor) -> Tensor:
        """The part: a view, or a copy if the index has a list. Raises IndexError if the part is empty or outside."""
        part = tensor[self._plain(tensor)]
        if part.numel() == 0 and tensor.numel() > 0:
            raise IndexError(f"selects nothing of a tensor of shape {list(tensor.shape)}")
        return part

    def put(self, tensor: Tensor, new: Tensor) -> Tensor:
        """A copy of the tensor in which `new` replaces the part."""
        changed = tensor.clone()
        changed[self._plain(tensor)] = new
        return changed

    def nothing_of(self, tensor: Tensor) -> bool:
        """Never: `of` raises for an empty part."""
        return False

    def leaves(self, dims: Sequence[int], of: int) -> bool:
        """Whether the index leaves these dimensions of a tensor with `of` dimensions whole and in their places."""
        items = list(self._items)
        if ... not in items:
            items.append(...)
        place = items.index(...)
        items[place : place + 1] = [slice(None)] * (of - len(items) + 1)
        from_start = [each for each in dims if each >= 0]
        needed = [*range(max(from_start, default=0) + 1), *(of + each for each in dims if each < 0)]
        return all(each < len(items) and items[each] in _WHOLE for each in needed)

    def keeps_samples(self, dims: int) -> bool:
        """Whether the part of a tensor with `dims` dimensions has all rows of the first one, the samples."""
        covered = dims - (len(self._items) - 1)
        first = self._items[0]
        if first is ... and covered < 1:
            first = self._items[1] if len(self._items) > 1 else slice(None)
        return first is ... or (isinstance(first, slice) and first in _WHOLE)

    def _plain(self, tensor: Tensor) -> Any:
        """The index in the form that torch takes."""
        if self._numbers is None:
            return self._items
        self._require_fit(tensor)
        positions = self._positions(tensor.device)
        return tuple(positions if isinstance(item, tuple) else item for item in self._items)

    def _positions(self, device: torch.device) -> Tensor:
        if torch.compiler.is_dynamo_compiling():  # a tensor made inside a graph must not be cached
            return torch.tensor(self._numbers, device=device)
        if (found := self._on.get(device)) is None:
            found = torch.tensor(self._numbers, device=device)
            if holds_data(found):
                self._on[device] = found
        return found

    def _require_fit(self, tensor: Tensor) -> None:
        """IndexError for positions outside the dimension; an accelerator would report them late or never."""
        dims, numbers = tensor.dim(), self._numbers
        dim = dims - self._from_end if self._after_ellipsis else self._place
        if numbers is None or not 0 <= dim < dims or (dim, size := tensor.shape[dim]) in self._fitting:
            return
        beyond = [number for number in numbers if not -size <= number < size]
        if beyond:
            raise IndexError(f"index {beyond[0]} is out of bounds for dimension {dim} with size {size}")
        there = [number % size for number in numbers]
        if len(set(there)) < len(there):
            raise IndexError(f"selects a position of dimension {dim} twice: its size is {size}")
        if self._in_order and dim == 0 and there != sorted(there):
            raise IndexError("picks samples out of order: sort the list in ascending order")
        if not torch.compiler.is_dynamo_compiling():
            self._fitting.add((dim, size))


_WHOLE = (slice(None), slice(0, None), slice(None, None, 1))
