"""Snapshots of a value: its containers are copied and its tensors detached and copied; unknown types are refused."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import pathlib
import re
import types
import uuid
from array import array
from collections import UserDict, deque
from collections.abc import Callable
from copy import copy
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hookrun.runtime.fast.copies import snapshot_of_tensor
from hookrun.values.containers import attributes, children, functorch_level, leaves, readable, replaced
from hookrun.values.index import Key, path_text
from hookrun.values.tensors import holds_data

Members = list[tuple[Key, Any]]

_NEVER_CHANGE = (
    bool, int, float, complex, str, bytes, range, slice, type, types.EllipsisType, types.NotImplementedType,
    types.FunctionType, types.BuiltinFunctionType, types.ModuleType,
    enum.Enum, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal,
    fractions.Fraction, pathlib.PurePath, uuid.UUID, re.Pattern, np.generic, np.dtype,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo,
    torch.SymInt, torch.SymFloat, torch.SymBool,
)  # fmt: skip


class Uncopyable(ValueError):
    """A value holds an object that cannot be copied; the message says which, where, and what to do."""


def snapshot(value: Any) -> Any:
    """A detached copy of the value, which later writes to its tensors and containers do not change.

    Raises Uncopyable for an object that is not a known container of tensors.
    """
    return copied(value, snapshot_of_tensor)


def copied(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of the value with `change` applied once to each distinct tensor, which stays one tensor in the copy.

    Raises Uncopyable.
    """
    if isinstance(value, Tensor):
        return change(value)
    made = dict[int, Tensor]()

    def changed(tensor: Tensor) -> Tensor:
        if (new := made.get(id(tensor))) is None:
            new = made[id(tensor)] = change(tensor)
        return new

    return _walk(value, changed, _rebuilt, (), value)


def opened(value: Any) -> Any:
    """The value with its containers as dicts by key, so that every tensor has a path, also in transformers caches.

    Raises Uncopyable.
    """

    def as_dict(container: Any, members: dict[Key, Any]) -> dict[Key, Any] | None:
        return None if container is None else members

    return _walk(value, lambda tensor: tensor, as_dict, (), value)


def held(value: Any) -> list[Tensor]:
    """Every tensor of a value, including those in transformers caches. Raises Uncopyable."""
    tensors = list[Tensor]()
    _walk(value, tensors.append, lambda container, members: None, (), value)
    return tensors


def _walk(
    value: Any,
    leaf: Callable[[Tensor], Any],
    join: Callable[[Any, dict[Key, Any]], Any],
    keys: tuple[Key, ...],
    whole: Any,
) -> Any:
    """The results of `leaf` for the tensors of the value, joined container by container.

    join:  of a container, or any other object that is not a tensor, and the results for its members by key
    keys:  the path of the value in `whole`, for the message of Uncopyable
    """
    if isinstance(value, Tensor):
        return leaf(value)
    members = _members(value)
    if members is None:
        raise Uncopyable(_refusal(value, keys, whole))
    return join(value, {key: _walk(member, leaf, join, (*keys, key), whole) for key, member in members})


TRACED = object()
"""What `in_reach` gives for a value with a tensor that has no data because it is being traced."""


def in_reach(value: Any) -> Any:
    """The value with its tensors unwrapped from `torch.func`; TRACED if a tensor has no data.

    A meta tensor is left as it is. Raises Uncopyable.
    """
    others = dict[int, Tensor]()
    for tensor in held(value):
        plain = tensor if tensor.is_meta else readable(tensor)
        if plain is None:
            return TRACED
        if plain is not tensor:
            others[id(tensor)] = plain
    return copied(value, lambda tensor: others.get(id(tensor), tensor)) if others else value


def append_copy(values: list[Any], value: Any) -> None:
    """Append a copy of the value to the list, unless a tensor of it has no data. Raises Uncopyable."""
    if type(value) is Tensor and functorch_level() is None and holds_data(value):
        values.append(value.detach().clone())
    elif (value := in_reach(value)) is not TRACED:
        with torch._C._DisableFuncTorch():
            values.append(snapshot(value))


# ---- known containers of tensors -------------------------------------------------------------------------------


def _members(value: Any) -> Members | None:
    """The members of a value by key: empty for a plain value; None for an object of an unknown type."""
    if value is None or isinstance(value, _NEVER_CHANGE) or _is_data(value):
        return []
    if isinstance(value, torch.nn.Module):
        return None
    if isinstance(value, tuple | list):
        return children(value)
    if isinstance(value, dict | UserDict | types.MappingProxyType):
        return list(value.items())
    if isinstance(value, set | frozenset | deque):
        return list(enumerate(value))
    if is_cache(value):  # other attributes, such as its configuration or a stream, are not copied
        return [
            (name, member)
            for name, member in attributes(value)
            if isinstance(member, Tensor) or _members(member) is not None
        ]
    if is_dataclass(value):
        return [*attributes(value)]
    if (node := pytree.SUPPORTED_NODES.get(type(value))) is not None:
        return _with_keys(node, value)
    return None


def _is_data(value: Any) -> bool:
    """Whether the value is a buffer of numbers, without references to other objects."""
    return isinstance(value, bytearray | array) or (
        isinstance(value, np.ndarray) and not value.dtype.hasobject
    )


def is_cache(value: Any) -> bool:
    """Whether the value is a cache of transformers, or a layer of one: they hold tensors as attributes."""
    return any(
        base.__module__ == "transformers.cache_utils"
        or (base.__module__.startswith("transformers.models.") and base.__name__.endswith("Cache"))
        for base in type(value).__mro__
    )


def _with_keys(node: Any, value: Any) -> Members:
    if node.flatten_with_keys_fn is None:
        return list(enumerate(node.flatten_fn(value)[0]))
    entries, _ = node.flatten_with_keys_fn(value)
    return [(_key(entry, place), member) for place, (entry, member) in enumerate(entries)]


def _key(entry: Any, place: int) -> Key:
    for name in ("key", "name", "idx"):
        if isinstance(key := getattr(entry, name, None), int | str):
            return key
    return place


def _rebuilt(value: Any, changed: dict[Key, Any]) -> Any:
    """A container of the same type with these members, by key in their order."""
    if _is_data(value):
        return value.copy() if isinstance(value, np.ndarray | bytearray) else copy(value)
    if value is None or isinstance(value, _NEVER_CHANGE):
        return value
    if isinstance(value, dict | tuple | list):
        return replaced(value, changed)
    if isinstance(value, UserDict):
        user_dict = copy(value)
        user_dict.data = changed
        return user_dict
    if isinstance(value, types.MappingProxyType):
        return types.MappingProxyType(changed)
    if isinstance(value, deque):
        return deque(changed.values(), value.maxlen)
    if isinstance(value, set | frozenset):
        return type(value)(changed.values())
    if is_dataclass(value) or is_cache(value):
        instance = object.__new__(type(value))
        for name, member in [*attributes(value), *changed.items()]:
            object.__setattr__(instance, str(name), member)  # works for a frozen dataclass too
        return instance
    node = pytree.SUPPORTED_NODES[type(value)]
    return node.unflatten_fn(list(changed.values()), node.flatten_fn(value)[1])


# ---- error messages --------------------------------------------------------------------------------------------


def _refusal(value: Any, keys: tuple[Key, ...], whole: Any) -> str:
    at = f" at {path_text(keys)!r}" if keys else ""
    # a tensor that could be captured instead: in the object, or elsewhere in the whole value
    paths = [path_text((*keys, name)) for name, member in attributes(value) if isinstance(member, Tensor)]
    paths += [path for path, leaf in leaves(whole) if isinstance(leaf, Tensor)]
    step = (
        f"name what to keep of the value with `target:`, such as target: {paths[0]}"
        if paths
        else "name a tensor of the value with `target:`, or hook a module that returns one"
    )
    return (
        f"it cannot copy the {type(value).__name__}{at}, which could change after the hook has fired; {step}"
    )
