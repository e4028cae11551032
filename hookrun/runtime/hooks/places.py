"""Replaces tensors inside a value. Mutable containers are written in place, because the caller may share them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from hookrun.containers import children, replaced


class Placed(NamedTuple):
    """A dict, list or dataclass in which `new` temporarily replaces `old`."""

    container: Any
    old: Tensor
    new: Tensor


def exchange(value: Any, news: Mapping[int, Any]) -> Any:
    """The value with members replaced; dicts, lists and dataclasses are written in place.

    news: id(old member) -> new member
    """
    if (new := news.get(id(value))) is not None:
        return new
    changed = {key: new for key, member in children(value) if (new := exchange(member, news)) is not member}
    return _changed(value, changed)


def place(value: Any, news: Iterator[Tensor], placed: list[Placed]) -> Any:
    """The value with each tensor that requires a gradient replaced by the next of `news`.

    placed: the replacements in mutable containers are added to it, for `put_back`
    """
    if isinstance(value, Tensor):
        return next(news) if value.requires_grad else value
    changed = dict[Any, Any]()
    for key, member in children(value):
        new = place(member, news, placed)
        if new is not member:
            changed[key] = new
            if isinstance(member, Tensor) and not isinstance(value, tuple):
                placed.append(Placed(value, member, new))
    return _changed(value, changed)


def put_back(placed: Sequence[Placed]) -> None:
    """Put the old tensors back wherever the new ones still are in their containers, under any key."""
    for container, old, new in reversed(placed):
        _changed(container, {key: old for key, member in children(container) if member is new})


def _changed(value: Any, changed: Mapping[Any, Any]) -> Any:
    """The value itself, written in place; for a tuple a new one."""
    if not changed:
        return value
    if isinstance(value, tuple):
        return replaced(value, dict(changed))
    for key, new in changed.items():
        if isinstance(value, dict | list):
            value[key] = new
        else:
            object.__setattr__(value, str(key), new)  # also where the dataclass is frozen
    return value
