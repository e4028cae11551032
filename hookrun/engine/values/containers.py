"""Values as hooks see them: tensors in tuples, lists, dicts, named tuples and dataclasses; read and rebuilt by path.

Mutable containers are rebuilt as copies, except that `exchange` and `place` write into them: the caller may share them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from hookrun.engine.values.index import Key, path_text
from hookrun.engine.values.private_names import require
from hookrun.engine.values.tensors import holds_data, shape_of, shapes_of
from hookrun.errors import nearest

require("torch")


def children(value: Any) -> list[tuple[Key, Any]]:
    """The members of a container with their keys; nothing for a tensor or anything else."""
    match value:
        case Tensor():
            return []
        case dict():
            return list(value.items())
        case tuple() if (names := field_names(value)) is not None:
            return list(zip(names, value, strict=True))
        case tuple() | list():
            return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return []


def field_names(value: tuple[Any, ...]) -> tuple[str, ...] | None:
    """The names of a named tuple's members, or of a torch return type (``x.max(0)``); else None."""
    if type(value).__module__ == "torch.return_types":
        return getattr(type(value), "__match_args__", None)
    return getattr(value, "_fields", None)


def leaves(value: Any, keys: tuple[Key, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every tensor and every None of a value, with its path."""
    if value is None or isinstance(value, Tensor):
        yield path_text(keys), value
    for key, member in children(value):
        yield from leaves(member, (*keys, key))


def path_of(value: Any, tensor: Tensor) -> str:
    """The path of a tensor in a value."""
    return next(path for path, leaf in leaves(value) if leaf is tensor)


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor of a value."""
    return (leaf for leaf in members(value) if isinstance(leaf, Tensor))


def rebuild(
    value: Any, change: Callable[[Any], Any], write: Callable[[Any, dict[Any, Any]], Any] | None = None
) -> Any:
    """The value with `change` applied to every member that is not a container; the same object if nothing changed.

    write: (container, key -> new member) -> the changed container; by default `replaced`
    """
    members = children(value)
    if not members:
        return change(value)
    changed = {key: new for key, member in members if (new := rebuild(member, change, write)) is not member}
    return (write or replaced)(value, changed) if changed else value


def members(value: Any) -> list[Any]:
    """All members of a value that are not containers, in the order of `rebuild`."""
    inside = children(value)
    if not inside:
        return [value]
    found: list[Any] = []  # torch.compile does not trace list[Any]()
    for _, member in inside:
        found += members(member)
    return found


def replaced(value: Any, changed: dict[Any, Any]) -> Any:
    """A copy of a container with the members in `changed` (key -> new member) replaced."""
    if type(value) in (dict, list):  # torch.compile does not trace copy.copy of them
        return _written(type(value)(value), changed)
    if not isinstance(value, tuple):
        return _written(copy.copy(value), changed)
    items = [changed.get(key, member) for key, member in children(value)]
    return value._make(items) if hasattr(value, "_make") else type(value)(items)


_functorch = torch._C._functorch
functorch_level = _functorch.maybe_current_level
"""The level of the current `torch.func` transform (vmap, grad, jvp, ...), or None."""


class TargetError(LookupError):
    """The value has no member at the target; the message says where the path ends and which members exist."""


def get(value: Any, keys: Sequence[Key]) -> Any:
    """The member at the end of a path, which may lead through an object's own attributes. Raises TargetError."""
    for depth, key in enumerate(keys):
        value = _member(value, key, tuple(keys[:depth]), readonly=True)
    return value


def attributes(value: Any) -> list[tuple[str, Any]]:
    """(name, value) of the instance attributes, in ``__dict__`` and in slots, including dataclass fields."""
    names = list(getattr(value, "__dict__", {}))
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [
        (name, getattr(value, name))
        for name in dict.fromkeys(names)
        if name not in ("__dict__", "__weakref__") and hasattr(value, name)
    ]


def put(value: Any, keys: Sequence[Key], new: Any) -> Any:
    """A copy of the value with the member at the end of a path replaced; the original containers are not changed."""
    if not keys:
        return new
    key = keys[0]
    member = _member(value, key, ())
    if isinstance(key, int) and key < 0 and isinstance(value, tuple | list):
        key += len(value)
    names = field_names(value) if isinstance(value, tuple) else None
    if isinstance(key, int) and names is not None:
        key = names[key]
    return replaced(value, {key: put(member, keys[1:], new)})


def _member(value: Any, key: Key, before: tuple[Key, ...], *, readonly: bool = False) -> Any:
    if isinstance(value, tuple | list) and isinstance(key, int) and -len(value) <= key < len(value):
        return value[key]
    members = dict(children(value))
    if readonly and not members and not isinstance(value, Tensor | Module):
        # not for writing: other code may refer to the same object
        members = dict[Key, Any](attributes(value))
    if key in members:
        return members[key]
    text = path_text((key,))
    what = f"{text!r} is not in the {_kind(value)}"
    if before:
        what += f" at {path_text(before)!r}"
    near = nearest(text, [path_text((name,)) for name in members]) if members else "it has no members"
    raise TargetError(f"{what}: {near}")


def _kind(value: Any) -> str:
    return f"tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call's arguments as one value: the tuple of them, or a dict ``{0: ..., 'name': ...}`` if some are keywords."""
    return {**dict(enumerate(args)), **kwargs} if kwargs else args


def call_with(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inverse of `arguments`."""
    if isinstance(value, tuple):
        return value, {}
    named = {key: member for key, member in value.items() if isinstance(key, str)}
    return tuple(member for key, member in value.items() if isinstance(key, int)), named


def unwrapped(value: Any) -> Any:
    """The only member of a tuple of one argument or gradient, else the value; likewise for a dict of such tuples."""
    if isinstance(value, dict):
        return {key: unwrapped(member) if type(member) is tuple else member for key, member in value.items()}
    return value[0] if type(value) is tuple and len(value) == 1 else value


def reshaped(old: Tensor, new: Tensor) -> str | None:
    """An error text if `new`, which replaces `old`, differs in shape, dtype or device; else None."""
    if shapes_of(old) != shapes_of(new):
        return f"the action changes the shape from {shape_of(old)} to {shape_of(new)}"
    if old.dtype != new.dtype:
        return f"the action changes the dtype from {old.dtype} to {new.dtype}"
    if old.device != new.device:
        return f"the action changes the device from {old.device} to {new.device}"
    return None


def form_changed(old: Any, new: Any) -> str | None:
    """How a value that replaces another differs in type, members, shape, dtype or device; None: in none of them."""
    if old is new:
        return None
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return reshaped(old, new)
    if type(old) is not type(new):
        return f"the action changes the type from {type(old).__name__} to {type(new).__name__}"
    before = children(old)
    after = children(new)
    if [key for key, _ in before] != [key for key, _ in after]:
        return f"the action changes the members of the {type(old).__name__}"
    for (_, member), (_, replacement) in zip(before, after, strict=True):
        text = form_changed(member, replacement)
        if text is not None:
            return text
    return None


def describe(value: Any) -> str:
    """The shapes of a value, as the plan shows them: ``[8, 64]`` or ``([8, 64], {'h': [8, 4]})``."""
    if isinstance(value, Tensor):
        return str(shape_of(value))
    members = children(value)
    if not members:
        return "None" if value is None else type(value).__name__
    if isinstance(value, list) or (isinstance(value, tuple) and field_names(value) is None):
        return "(" + ", ".join(describe(member) for _, member in members) + ")"
    return "{" + ", ".join(f"{key}: {describe(member)}" for key, member in members) + "}"


def readable(tensor: Tensor) -> Tensor | None:
    """The tensor unwrapped from `torch.func`; None where it has no data or is being traced.

    Dimensions that `vmap` maps over come first: [D] under a vmap over B becomes [B, D].
    """
    if holds_data(tensor):
        return tensor
    if not _functorch.is_functorch_wrapped_tensor(tensor):
        return None
    mapped: list[int] = []
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            mapped.append(_functorch.maybe_get_bdim(tensor))
        elif _functorch.is_functionaltensor(tensor):
            torch._utils._functionalize_sync(tensor)
        tensor = _functorch.get_unwrapped(tensor)
    if not holds_data(tensor):
        return None
    with torch._C._DisableFuncTorch():
        for place, dim in enumerate(reversed(mapped)):
            tensor = tensor.movedim(dim + place, place)
        return tensor.detach()


def plain(tensor: Tensor) -> Tensor:
    """The result of `readable` if it is a tensor, else the tensor itself."""
    found = readable(tensor)
    return tensor if found is None else found


def differentiable(value: Any, *, leaf: bool = False) -> Any:
    """A copy of a floating-point or complex tensor that requires a gradient; any other value as it is.

    leaf: whether the copy is a leaf of the graph, which must not be written in place; compilers warn about non-leaves
    """
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    with torch.enable_grad():
        return value.detach().clone().requires_grad_() if leaf else value.detach().requires_grad_().clone()


Placed = tuple[Any, Tensor, Tensor]
"""(container, old, new): a dict, list or dataclass in which `new` temporarily replaces `old`."""


def exchange(value: Any, news: Mapping[int, Any]) -> Any:
    """The value with members replaced; dicts, lists and dataclasses are written in place.

    news: id(old member) -> new member
    """
    return rebuild(value, lambda leaf: news.get(id(leaf), leaf), _changed)


def place(value: Any, news: Iterator[Tensor], placed: list[Placed]) -> Any:
    """The value with each tensor that requires a gradient replaced by the next of `news`.

    placed: the replacements in mutable containers are added to it, for `put_back`
    """

    def write(container: Any, changed: dict[Any, Any]) -> Any:
        for key, old in children(container):
            if key in changed and isinstance(old, Tensor) and not isinstance(container, tuple):
                placed.append((container, old, changed[key]))
        return _changed(container, changed)

    return rebuild(
        value, lambda leaf: next(news) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf, write
    )


def put_back(placed: Sequence[Placed]) -> None:
    """Put the old tensors back wherever the new ones still are in their containers, under any key."""
    for container, old, new in reversed(placed):
        _changed(container, {key: old for key, member in children(container) if member is new})


def _changed(value: Any, changed: dict[Any, Any]) -> Any:
    """The value itself, written in place; for a tuple a new one."""
    return replaced(value, changed) if changed and isinstance(value, tuple) else _written(value, changed)


def _written(value: Any, changed: Mapping[Any, Any]) -> Any:
    """A dict, list or dataclass with the members in `changed`, which are written into it."""
    for key, new in changed.items():
        if isinstance(value, (dict, list)):  # torch.compile does not trace dict | list
            value[key] = new
        else:
            object.__setattr__(value, str(key), new)  # also where the dataclass is frozen
    return value
