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
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hookrun.engine.runtime.fast.copies import snapshot_of_tensor
from hookrun.engine.values.containers import (
    attributes,
    children,
    functorch_level,
    leaves,
    readable,
    replaced,
)
from hookrun.engine.values.index import Key, path_text
from hookrun.engine.values.tensors import holds_data

Rebuild = Callable[[Any, dict[Key, Any]], Any]
"""A container, and members by key in their order -> a container like it with these members."""

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
    made: dict[int, Tensor] = {}

    def changed(tensor: Tensor) -> Tensor:
        if (new := made.get(id(tensor))) is None:
            new = made[id(tensor)] = change(tensor)
        return new

    return _walk(value, changed, lambda container, rebuild, members: rebuild(container, members), (), value)


def opened(value: Any) -> Any:
    """The value with its containers as dicts by key, so that every tensor has a path, also in transformers caches.

    Raises Uncopyable.
    """

    def as_dict(container: Any, rebuild: Rebuild, members: dict[Key, Any]) -> dict[Key, Any] | None:
        return None if container is None else members

    return _walk(value, lambda tensor: tensor, as_dict, (), value)


def held(value: Any) -> list[Tensor]:
    """Every tensor of a value, including those in transformers caches. Raises Uncopyable."""
    tensors: list[Tensor] = []
    _walk(value, tensors.append, lambda container, rebuild, members: None, (), value)
    return tensors


def _walk(
    value: Any,
    leaf: Callable[[Tensor], Any],
    join: Callable[[Any, Rebuild, dict[Key, Any]], Any],
    keys: tuple[Key, ...],
    whole: Any,
) -> Any:
    """The results of `leaf` for the tensors of the value, joined container by container.

    join:  of a container, or any other object that is not a tensor, its `Rebuild`, and the results for its members
    keys:  the path of the value in `whole`, for the message of Uncopyable
    """
    if isinstance(value, Tensor):
        return leaf(value)
    if (container := _container(value)) is None:
        raise Uncopyable(_refusal(value, keys, whole))
    members, rebuild = container
    results = {key: _walk(member, leaf, join, (*keys, key), whole) for key, member in members}
    return join(value, rebuild, results)


TRACED = object()
"""What `in_reach` gives for a value with a tensor that has no data because it is being traced."""


def in_reach(value: Any) -> Any:
    """The value with its tensors unwrapped from `torch.func`; TRACED if a tensor has no data.

    A meta tensor is left as it is. Raises Uncopyable.
    """
    others: dict[int, Tensor] = {}
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


def _container(value: Any) -> tuple[list[tuple[Key, Any]], Rebuild] | None:
    """The members of a value by key (a plain value has none), and how to make it anew; None for an unknown type."""
    if value is None or isinstance(value, _NEVER_CHANGE):
        return [], lambda value, members: value
    if isinstance(value, bytearray | array) or (isinstance(value, np.ndarray) and not value.dtype.hasobject):
        return [], lambda value, members: copy(value)
    if isinstance(value, torch.nn.Module):
        return None
    if isinstance(value, tuple | list):
        return children(value), replaced
    if isinstance(value, dict):
        return list(value.items()), replaced
    if isinstance(value, UserDict):
        return list(value.items()), lambda value, members: _with_attributes(value, {"data": members})
    if isinstance(value, types.MappingProxyType):
        return list(value.items()), lambda value, members: types.MappingProxyType(members)
    if isinstance(value, set | frozenset):
        return list(enumerate(value)), lambda value, members: type(value)(members.values())
    if isinstance(value, deque):
        return list(enumerate(value)), lambda value, members: deque(members.values(), value.maxlen)
    if is_cache(value):  # other attributes, such as its configuration or a stream, are not copied
        copied_too: list[tuple[Key, Any]] = [
            (name, member)
            for name, member in attributes(value)
            if isinstance(member, Tensor) or _container(member) is not None
        ]
        return copied_too, _with_attributes
    if is_dataclass(value):
        return [*attributes(value)], _with_attributes
    if (node := pytree.SUPPORTED_NODES.get(type(value))) is not None:
        _, form = node.flatten_fn(value)
        return _of_node(node, value), lambda value, members: node.unflatten_fn(list(members.values()), form)
    return None


def _with_attributes(value: Any, changed: Mapping[Key, Any]) -> Any:
    """A shallow copy of an object with some attributes changed, also where they are read-only."""
    instance = object.__new__(type(value))
    for name, member in [*attributes(value), *changed.items()]:
        object.__setattr__(instance, str(name), member)
    return instance


def _of_node(node: Any, value: Any) -> list[tuple[Key, Any]]:
    """The members of a node of torch's pytree: by its own keys or names, if it has any, else by place."""
    if node.flatten_with_keys_fn is None:
        return list(enumerate(node.flatten_fn(value)[0]))
    entries, _ = node.flatten_with_keys_fn(value)
    return [
        (getattr(entry, "key", getattr(entry, "name", place)), member)
        for place, (entry, member) in enumerate(entries)
    ]


def is_cache(value: Any) -> bool:
    """Whether the value is a cache of transformers, or a layer of one: they hold tensors as attributes."""
    return any(
        base.__module__ == "transformers.cache_utils"
        or (base.__module__.startswith("transformers.models.") and base.__name__.endswith("Cache"))
        for base in type(value).__mro__
    )


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
