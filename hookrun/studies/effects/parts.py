"""The copies of a batch in one value: its parts, and the value with new parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hookrun.engine.values.containers import members, rebuild


def parts_of(value: Any, parts: int, rows: set[int]) -> list[Any]:
    """The value for each copy of the batch. ValueError if its tensors do not hold one part after the other.

    rows: the sizes of the first dimension that a tensor for one copy may have
    """
    pieces = [_pieces(leaf, parts, rows) for leaf in members(value)]
    copies: list[Any] = []
    for part in range(parts):
        copies.append(with_members(value, [of_leaf[part] for of_leaf in pieces]))
    return copies


def _pieces(leaf: Any, parts: int, rows: set[int]) -> Sequence[Any]:
    """The part of a tensor for each copy; a tensor that is the same for all of them, and what is not a tensor."""
    if not isinstance(leaf, Tensor) or not leaf.dim() or not rows:
        return [leaf] * parts
    is_for_one = leaf.shape[0] in rows
    is_for_all = leaf.shape[0] % parts == 0 and leaf.shape[0] // parts in rows
    if is_for_one == is_for_all:
        raise ValueError(f"a tensor of shape {list(leaf.shape)} for {parts} copies of the batch")
    return leaf.chunk(parts) if is_for_all else [leaf] * parts


def joined(value: Any, olds: Sequence[Any], news: Sequence[Any]) -> Any:
    """The value with the new parts, each the same object as the old one where nothing has changed."""
    before = [members(old) for old in olds]
    after = [members(new) for new in news]
    leaves = members(value)
    for place, leaf in enumerate(leaves):
        parts = [of_copy[place] for of_copy in after]
        if all(part is of_copy[place] for part, of_copy in zip(parts, before, strict=True)):
            continue
        if before[0][place] is leaf:
            raise ValueError("a tensor that all copies of the batch share would change")
        leaves[place] = torch.cat(parts)
    return with_members(value, leaves)


def with_members(value: Any, leaves: Iterable[Any]) -> Any:
    """The value with other members that are not containers."""
    rest = iter(leaves)
    return rebuild(value, lambda leaf: next(rest))
