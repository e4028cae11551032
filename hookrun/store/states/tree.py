"""Plain values with tensors in them, as JSON and a table of tensors: what a resumable state consists of.

A tree consists of None, bool, int, float, str, list, tuple, dict, Counter and torch.Tensor only. Reading it
back gives an equal tree, types of keys included, and runs nothing from the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import Tensor

from hookrun.errors import HookrunError
from hookrun.store.captures.tensor_file import unstorable

_TENSOR = "tensor"
_TUPLE = "tuple"
_COUNTER = "counter"
_ITEMS = "items"
_KEYS = "keys"


class NotPlain(HookrunError):
    """A value that a tree cannot hold; the message names its place and its type."""


def flatten(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """The tree as JSON values, and its tensors by number; a tensor that occurs twice is stored once.

    Raises NotPlain for a value that a tree cannot hold.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[object, str] = {}

    def flat(value: Any, where: tuple[Any, ...]) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is tuple:
            return {_TUPLE: flat(list(value), where)}
        if kind is list:
            items = list(value)
            for number, item in enumerate(items):
                if type(item) not in _PLAIN:  # lists may be long
                    items[number] = flat(item, (*where, number))
            return items
        if isinstance(value, Mapping) and kind.__module__ in ("builtins", "collections"):
            form = _COUNTER if isinstance(value, Counter) else _ITEMS
            if form == _ITEMS and all(type(key) is str for key in value):
                return {_KEYS: {key: flat(item, (*where, key)) for key, item in value.items()}}
            return {form: [[flat(key, where), flat(item, (*where, key))] for key, item in value.items()]}
        if isinstance(value, Tensor):
            problem = unstorable(value)
            if problem:
                raise NotPlain(f"{_place(where)}: {problem}")
            same: list[object] = [value.device, value.data_ptr(), value.dtype, value.shape, value.stride()]
            if not value.numel():
                same.append(len(tensors))  # tensors without elements have no address
            name = names.setdefault(tuple(same), str(len(tensors)))
            tensors.setdefault(name, value.detach())
            return {_TENSOR: name}
        if isinstance(value, str):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):  # NumPy's float64 is a subclass of float
            return float(value)
        raise NotPlain(f"{_place(where)} is a {kind.__module__}.{kind.__qualname__}")

    return flat(tree, ()), tensors


def unflatten(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The tree that `flatten` was given, with shared tensors shared again. Raises ValueError for any other value."""
    return _tree(value, cache(tensor))


_PLAIN = frozenset({type(None), bool, str, int, float})


def _place(where: tuple[Any, ...]) -> str:
    return ".".join(map(str, where)) or "the whole"


def _tree(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    if isinstance(value, list):
        return [_tree(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError(f"a value with the keys {', '.join(map(str, value))[:100]}")
    ((kind, inner),) = value.items()
    if kind == _TENSOR and isinstance(inner, str):
        return tensor(inner)
    if kind == _KEYS and isinstance(inner, dict):
        return {key: _tree(item, tensor) for key, item in inner.items()}
    if kind == _TUPLE and isinstance(inner, list):
        return tuple(_tree(item, tensor) for item in inner)
    if kind in (_ITEMS, _COUNTER) and isinstance(inner, list):
        try:
            pairs = {_tree(key, tensor): _tree(item, tensor) for key, item in inner}
        except TypeError as error:
            raise ValueError(f"a mapping that cannot be read: {error}") from error
        if kind == _COUNTER:
            return Counter(pairs)
        return pairs
    raise ValueError(f"a value of the kind {kind!r:.100}")
