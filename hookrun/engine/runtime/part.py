"""The part of a tensor that `index`, `heads` and `tokens` select: reading it, writing it back; parts of parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor

from hookrun.engine.actions.values import is_by_sample
from hookrun.engine.plan.batch import BatchDims
from hookrun.engine.plan.plan import HeadCount, PlannedHook
from hookrun.engine.runtime.clock import CurrentCall
from hookrun.engine.runtime.tokens.choice import Chosen, Rule
from hookrun.engine.spec.heads import Heads
from hookrun.engine.values.index import Index
from hookrun.engine.values.tensors import holds_data, ordinary_tensors


class TensorPart(ABC):
    """The part of each tensor that a hook acts on."""

    token_dims: tuple[int, ...] = ()
    """The dimensions along which `tokens` selects positions, with the batch as dimension 0."""

    @abstractmethod
    def find(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """A view of the tensor, and the index of the part in it. Raises IndexError or ValueError if there is none."""

    def of(self, tensor: Tensor) -> Tensor:
        """The part of this tensor."""
        view, index = self.find(tensor)
        return view[index]

    def put(self, tensor: Tensor, new: Tensor) -> Tensor:
        """A copy of the tensor in which `new` replaces the part."""
        changed = tensor.clone()
        view, index = self.find(changed)
        view[index] = new
        return changed

    def place_of(self, dim: int, dims: int) -> int | None:
        """Where a dimension of a tensor with `dims` dimensions is in the part; None if it is not whole there."""
        return dim

    def nothing_of(self, tensor: Tensor) -> bool:
        """Whether the part of this tensor is empty, so that there is nothing to act on."""
        return False


class PartOfPart(TensorPart):
    """The inner part of an outer part."""

    def __init__(self, outer: TensorPart, inner: TensorPart) -> None:
        self._outer = outer
        self._inner = inner
        self.token_dims = inner.token_dims

    def find(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """A view of the outer part, and the index of the inner part in it."""
        return self._inner.find(self._outer.of(tensor))

    def put(self, tensor: Tensor, new: Tensor) -> Tensor:
        """A copy of the tensor in which `new` replaces the inner part."""
        return self._outer.put(tensor, self._inner.put(self._outer.of(tensor), new))

    def place_of(self, dim: int, dims: int) -> int | None:
        """Where it is in the inner part. `heads` before `index` are a dimension of their own, behind the others."""
        place = self._outer.place_of(dim, dims)
        return None if place is None else self._inner.place_of(place, dims)

    def nothing_of(self, tensor: Tensor) -> bool:
        """Whether either part is empty."""
        return self._outer.nothing_of(tensor) or self._inner.nothing_of(self._outer.of(tensor))


class BatchFirst(TensorPart):
    """The part with the batch as its first dimension, which hooks that treat each sample by itself get.

    required: raise ValueError for a tensor without a batch dimension, instead of leaving it as it is
    takes_values: each sample has a value of its own
    """

    def __init__(
        self,
        inner: TensorPart | None,
        batch: BatchDims,
        current: CurrentCall,
        *,
        required: bool,
        takes_values: bool = False,
    ) -> None:
        self._inner = inner
        self._batch = batch
        self._current = current
        self._required = required
        self._takes_values = takes_values

    def find(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """The part, and the index of all of it."""
        return self.of(tensor), ...

    def of(self, tensor: Tensor) -> Tensor:
        """The part. Raises ValueError if it has no batch dimension and needs one."""
        part = tensor
        if self._inner is not None:
            part = self._inner.of(tensor)
        place = self._place(tensor)
        if place:
            part = part.movedim(place, 0)
        return part

    def put(self, tensor: Tensor, new: Tensor) -> Tensor:
        """A copy of the tensor in which `new` replaces the part."""
        place = self._place(tensor)
        if place:
            new = new.movedim(0, place)
        if self._inner is not None:
            new = self._inner.put(tensor, new)
        return new

    def place_of(self, dim: int, dims: int) -> int | None:
        """The batch is first."""
        return 0

    def nothing_of(self, tensor: Tensor) -> bool:
        """Whether the inner part is empty."""
        return self._inner is not None and self._inner.nothing_of(tensor)

    def _place(self, tensor: Tensor) -> int | None:
        """The batch dimension of the part of this tensor."""
        dim = self._batch.of(self._current.path)
        if dim is not None and dim >= tensor.dim():
            dim = None
        place = dim
        if dim is not None and self._inner is not None:
            place = self._inner.place_of(dim, tensor.dim())
        if place is None and self._required:
            if dim is None:
                raise ValueError(no_batch(tensor))
            if self._takes_values:
                raise ValueError(_PICKS_ROWS)
            raise ValueError(_picks_samples(tensor))
        return place


def _picks_samples(tensor: Tensor) -> str:
    return (
        f"`index` picks samples or positions of a tensor of shape {list(tensor.shape)}, and `tokens`, `when` or `keep` "
        "need all of them: let `index` begin with ..., or leave it out"
    )


_PICKS_ROWS = (
    "`index` picks rows of the batch, and the value has a row for each sample: add at: same to the value"
)


def no_batch(tensor: Tensor) -> str:
    """Why a hook cannot treat each sample of this tensor by itself."""
    return (
        "the hook treats each sample by itself, and no dimension of the tensor follows the batch: it has shape "
        f"{list(tensor.shape)}; hook another module, name a tensor with `target`, or the dimension with `batch_dim`"
    )


class Part(TensorPart):
    """The part of a tensor that an index selects: a view, or a copy if the index has a list.

    in_order:  the rows of the first dimension, which are samples, must stay in their order
    whole:     the dimensions that must stay whole and in their places, because `tokens` selects positions along them
    """

    def __init__(self, index: Index, *, in_order: bool = False, whole: Sequence[int] = ()) -> None:
        self._items = index.items
        self._numbers = index.positions
        self._in_order = in_order
        self._whole = whole
        self._fitting: set[tuple[int, int]] = set()
        self._on: dict[torch.device, Tensor] = {}
        if self._numbers is not None:
            place = self._items.index(self._numbers)
            self._place = place - len(self._items) if ... in self._items[:place] else place

    def find(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor, and the index in the form that torch takes."""
        if self._whole and not self.leaves(self._whole, tensor.dim()):
            raise ValueError(_picks_samples(tensor))
        if self._numbers is None:
            return tensor, self._items
        self._require_fit(tensor)
        positions = self.positions(tensor.device)
        return tensor, tuple(positions if isinstance(item, tuple) else item for item in self._items)

    def of(self, tensor: Tensor) -> Tensor:
        """The part. Raises IndexError if it is empty or outside."""
        part = super().of(tensor)
        if part.numel() == 0 and tensor.numel() > 0:
            raise IndexError(f"selects nothing of a tensor of shape {list(tensor.shape)}")
        return part

    def leaves(self, dims: Sequence[int], of: int) -> bool:
        """Whether the index leaves these dimensions of a tensor with `of` dimensions whole and in their places."""
        items = self._of_dims(of)
        if min(dims) < 0 and any(isinstance(item, int) for item in items[min(dims) :]):
            return False  # it takes away a dimension behind one of them
        from_start = [dim for dim in dims if dim >= 0]
        needed = [*range(max(from_start, default=0) + 1), *(of + dim for dim in dims if dim < 0)]
        return all(dim < len(items) and items[dim] in _WHOLE for dim in needed)

    def place_of(self, dim: int, dims: int) -> int | None:
        """Where a dimension is in the part; None if the index picks from it, or moves it to another place."""
        items = self._of_dims(dims)
        numbers = [isinstance(item, int) for item in items]
        is_moved = any(numbers) and self._numbers is not None  # torch then puts the list's dimension first
        if dim >= len(items) or items[dim] not in _WHOLE or is_moved:
            return None
        return dim - sum(numbers[:dim])

    def _of_dims(self, dims: int) -> list[Any]:
        """The item of the index for each dimension of a tensor with `dims` dimensions."""
        items = list(self._items)
        if ... not in items:
            items.append(...)
        place = items.index(...)
        items[place : place + 1] = [slice(None)] * (dims - len(items) + 1)
        return items

    def positions(self, device: torch.device) -> Tensor:
        """The list of the index as a tensor, made once for each device."""
        if torch.compiler.is_dynamo_compiling():  # a tensor made inside a graph must not be cached
            return torch.tensor(self._numbers, device=device)
        if (positions := self._on.get(device)) is None:
            with ordinary_tensors():
                positions = torch.tensor(self._numbers, device=device)
            if holds_data(positions):
                self._on[device] = positions
        return positions

    def _require_fit(self, tensor: Tensor) -> None:
        """IndexError for positions outside the dimension; an accelerator would report them late or never."""
        dims = tensor.dim()
        numbers = self._numbers
        dim = self._place
        if dim < 0:
            dim += dims
        if numbers is None or not 0 <= dim < dims or (dim, size := tensor.shape[dim]) in self._fitting:
            return
        beyond = [number for number in numbers if not -size <= number < size]
        if beyond:
            raise IndexError(f"index {beyond[0]} is out of bounds for dimension {dim} with size {size}")
        positions = [number % size for number in numbers]
        if len(set(positions)) < len(positions):
            raise IndexError(f"selects a position of dimension {dim} twice: its size is {size}")
        if self._in_order and dim == 0 and positions != sorted(positions):
            raise IndexError("picks samples out of order: sort the list in ascending order")
        if not torch.compiler.is_dynamo_compiling():
            self._fitting.add((dim, size))


_WHOLE = (slice(None), slice(0, None), slice(None, None, 1))


class HeadsPart(TensorPart):
    """Some heads of a tensor. A last dimension of size heads × width is split into two: [..., heads, width].

    not_dim:   the sequence dimension, which is never taken as the head dimension
    batch_dim: returns the batch dimension, which is not taken either
    """

    def __init__(
        self, heads: Heads, counted: HeadCount, not_dim: int, batch_dim: Callable[[], int | None] = lambda: 0
    ) -> None:
        self._heads = heads
        self._counted = counted
        self._not_dim = not_dim
        self._batch_dim = batch_dim
        self._picked = Part(Index(f"heads {list(heads.pick)}", (heads.pick,)))
        self._seen = dict[int, int | None]()

    def find(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor with a dimension of heads, and the index of the heads."""
        dim, count = self.place(tensor)
        picked = self._picked.positions(tensor.device)
        if dim is None:
            return tensor.unflatten(-1, (count, -1)), (..., picked, slice(None))
        return tensor, (*[slice(None)] * dim, picked)

    def place(self, tensor: Tensor) -> tuple[int | None, int]:
        """The head dimension, or None if the last dimension holds heads × width; and the number of heads.

        Raises ValueError if the tensor does not have the heads.
        """
        dims = tensor.dim()
        shape = tensor.shape
        dim = self._heads.dim if self._heads.dim is not None else self._dim(shape)
        counts = self._counted.counts
        if dim is not None and (dim >= dims or shape[dim] not in counts):
            raise ValueError(
                f"heads: dimension {dim} of shape {list(shape)} is not a dimension of {_text(counts)} heads"
            )
        count = self._in_last(shape) if dim is None else shape[dim]
        if len(counts) > 1 and (wrong := self._heads.misfit(count)) is not None:
            raise ValueError(f"heads: {wrong}")
        return dim, count

    def _dim(self, shape: Sequence[int]) -> int | None:
        dims = len(shape)
        if dims < 4:
            return None
        others = (self._not_dim, self._batch_dim())
        fitting = [
            dim for dim in range(1, dims - 1) if shape[dim] in self._counted.counts and dim not in others
        ]
        if len(fitting) == 1:
            self._seen[dims] = fitting[0]
        elif fitting and self._seen.get(dims) in fitting:
            return self._seen[dims]
        if len(fitting) > 1:
            raise ValueError(
                f"heads: dimensions {fitting} of shape {list(shape)} could all be the head dimension: select one with "
                f"heads: {{pick: {list(self._heads.pick)}, dim: {fitting[0]}}}"
            )
        return fitting[0] if fitting else None

    def _in_last(self, shape: Sequence[int]) -> int:
        counted = self._counted
        size = shape[-1] if shape else 0
        fits: list[int] = []  # torch.compile does not trace list[int]()
        for count in counted.counts:
            divides = size > 0 and size % count == 0
            if divides and counted.width in (None, size // count):
                fits.append(count)
        if not fits:
            width = f" of width {counted.width}" if counted.width is not None else ""
            raise ValueError(
                f"heads: the last dimension of shape {list(shape)} does not hold {_text(counted.counts)} heads{width}, "
                "and no other dimension has that size; hook the input of the output projection, or say how many "
                "heads this tensor has: heads: {count: …, pick: …}"
            )
        if not counted.in_last:
            raise ValueError(
                f"heads: the last dimension of shape {list(shape)} has the size of {fits[0]} heads and does not hold "
                "heads here; hook the input of the attention's output projection (`hook: forward_pre`), or the point z "
                "that model.args.attention=points adds; if this tensor does hold heads, say how many: "
                f"heads: {{count: {fits[0]}, pick: {list(self._heads.pick)}}}"
            )
        return fits[0]


def _text(counts: Sequence[int]) -> str:
    return " or ".join(map(str, counts))


class TokensPart(TensorPart):
    """The selected positions of a tensor with a sequence dimension, as rows [N, ...].

    token_dims: one, or two for attention patterns
    """

    def __init__(self, rule: Rule, current: CurrentCall) -> None:
        self._rule = rule
        self._current = current
        tokens = rule.tokens
        if tokens.on_pattern:
            axes = ((tokens.query, -2), (tokens.key, -1))
            self.token_dims = tuple(dim for axis, dim in axes if axis is not None)
        else:
            self.token_dims = (tokens.dim if tokens.dim is not None else 1,)

    def find(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor with the position dimensions right after the first one, and the indices of the N positions."""
        indices = self.chosen(tensor).on(tensor.device)
        if self.token_dims == (1,):
            if tensor.is_contiguous() and len(indices[0]) == prod(tensor.shape[:2]):
                return tensor.flatten(0, 1), ...  # all rows: an index would copy them one by one
            return tensor, indices
        return tensor.movedim(self.token_dims, tuple(range(1, len(self.token_dims) + 1))), indices

    def nothing_of(self, tensor: Tensor) -> bool:
        """Whether the current pass computes none of the positions."""
        return not len(self.chosen(tensor))

    def chosen(self, tensor: Tensor) -> Chosen:
        """The positions in this tensor. Raises ValueError if the tokens of the call are not known or do not fit it."""
        tokens_of_call = self._current.tokens
        shape = tensor.shape
        if tokens_of_call is None:
            raise ValueError(
                "tokens: it is not known which tokens the call computes; call the model with input_ids, or "
                "hooks.tokens(input_ids, attention_mask) before it; for a value without tokens use `index`"
            )
        if tokens_of_call.drafts:
            raise ValueError(
                "tokens: a speculative decoding may reject tokens that a call computes. It has an assistant model or "
                "prompt_lookup_num_tokens, a first call longer than its prompt, or a cache that has shrunk: generate "
                "without drafts"
            )
        on_pattern = self._rule.tokens.on_pattern
        if on_pattern and len(shape) < 3:
            raise ValueError(
                f"tokens: query and key are the last two dimensions of an attention pattern, and the tensor has "
                f"shape {list(shape)}"
            )
        if len(shape) <= self.token_dims[0]:
            raise ValueError(
                f"tokens: the tensor of shape {list(shape)} does not have a dimension {self.token_dims[0]}; name "
                "another one with `dim`, or the tensor with `target`"
            )
        if shape[0] != tokens_of_call.rows:
            raise ValueError(
                f"tokens: the tensor of shape {list(shape)} does not have a row for each of the {tokens_of_call.rows} "
                "sequences of the call; name the tensor with `target`"
            )
        sizes = tuple(shape[-2:]) if on_pattern else (shape[self.token_dims[0]],)
        chosen = self._rule.choose(tokens_of_call, sizes, self._current.clock.samples)
        self._current.chosen = chosen
        return chosen


def part_of(
    hook: PlannedHook, path: str, current: CurrentCall, batch: BatchDims | None = None, *, once: bool = False
) -> TensorPart | None:
    """The part at one module: `heads` first, then `index` within these, then `tokens`; None: the whole tensor.

    batch: which dimension is the batch there; hooks that treat each sample by itself get it first. None: as planned
    once:  positions that a generation computes again are left out, as captures do
    """
    spec = hook.spec
    keys = spec.keys
    action = spec.action
    if not spec.acts_on_part:
        return None
    dims = batch or hook.batch_of(path)
    parts = list[TensorPart]()
    tokens = None
    if keys.tokens is not None:
        tokens = TokensPart(Rule(keys.tokens, once, hook.texts), current)
    if keys.heads is not None:
        not_dim = -1 if tokens is None else tokens.token_dims[0]
        parts.append(HeadsPart(keys.heads, hook.heads[path], not_dim, lambda: dims.of(current.path)))
    if keys.index is not None:
        whole = () if tokens is None else tokens.token_dims
        parts.append(Part(keys.index, in_order=spec.hook_type.batch and action.captures, whole=whole))
    if spec.needs_batch and (keys.index is not None or not dims.is_first):
        inner = reduce(PartOfPart, parts) if parts else None
        takes_values = any(map(is_by_sample, action.outside_values().values()))
        parts = [BatchFirst(inner, dims, current, required=spec.part_by_sample, takes_values=takes_values)]
    if tokens is not None:
        parts.append(tokens)
    return reduce(PartOfPart, parts) if parts else None
