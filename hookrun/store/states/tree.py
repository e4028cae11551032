"""Plain values with tensors in them, as JSON and a table of tensors: what a resumable state consists of.

A tree consists of None, bool, int, float, str, list, tuple, dict, Counter and torch.Tensor only. Reading it
back gives an equal tree, types of keys included, and runs nothing from the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from hookrun.errors import HookrunError
from hookrun.store.captures.tensor_file import unstorable

_TENSOR, _TUPLE, _COUNTER, _ITEMS, _KEYS = "tensor", "tuple", "counter", "items", "keys"


class NotPlain(HookrunError):
    """A value that a tree cannot hold; the message names its place and its type."""


def flatten(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """The tree as JSON values, and its tensors by number; a tensor that occurs twice is stored once.

    Raises NotPlain for a value that a tree cannot hold.
    """
    flattening = _Flattening()
    return flattening.value(tree, ()), flattening.tensors


def unflatten(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The tree that `flatten` was given, with shared tensors shared again. Raises ValueError for any other value."""
    found = dict[str, Tensor]()

    def once(name: Any) -> Tensor:
        if name not in found:
            found[name] = tensor(str(name))
        return found[name]

    return _tree(value, once)


_PLAIN = frozenset({type(None), bool, str, int, float})
_TEXT = frozenset({str})


class _Flattening:
    def __init__(self) -> None:
        self.tensors = dict[str, Tensor]()
        self._names = dict[object, str]()

    def value(self, value: Any, where: tuple[Any, ...]) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is dict:  # checked first because most values are
            return self._mapping(value, where)
        if isinstance(value, Tensor):
            return {_TENSOR: self._named(value, where)}
        if isinstance(value, bool | str):
            return value
        if isinstance(value, int | float):  # NumPy's float64 is a subclass of float
            return int(value) if isinstance(value, int) else float(value)
        if isinstance(value, Counter):
            return {_COUNTER: self._items(value, where)}
        if isinstance(value, Mapping) and kind.__module__ in ("builtins", "collections"):
            return self._mapping(value, where)
        if kind is list:
            return self._list(value, where)
        if kind is tuple:
            return {_TUPLE: self._list(value, where)}
        raise NotPlain(f"{_place(where)} is a {kind.__module__}.{kind.__qualname__}")

    def _list(self, value: Sequence[Any], where: tuple[Any, ...]) -> list[Any]:
        return [
            item if type(item) in _PLAIN else self.value(item, (*where, number))
            for number, item in enumerate(value)
        ]

    def _mapping(self, value: Mapping[Any, Any], where: tuple[Any, ...]) -> dict[str, Any]:
        if not _TEXT.issuperset(map(type, value)):
            return {_ITEMS: self._items(value, where)}
        return {
            _KEYS: {
                key: item if type(item) in _PLAIN else self.value(item, (*where, key))
                for key, item in value.items()
            }
        }

    def _items(self, value: Mapping[Any, Any], where: tuple[Any, ...]) -> list[Any]:
        return [[self.value(key, where), self.value(item, (*where, key))] for key, item in value.items()]

    def _named(self, tensor: Tensor, where: tuple[Any, ...]) -> str:
        if problem := unstorable(tensor):
            raise NotPlain(f"{_place(where)}: {problem}")
        same: tuple[object, ...] = (
            tensor.device,
            tensor.data_ptr(),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
        )
        if not tensor.numel():
            same = (*same, len(self.tensors))  # tensors without elements have no address
        name = self._names.setdefault(same, str(len(self.tensors)))
        self.tensors.setdefault(name, tensor.detach())
        return name


def _place(where: tuple[Any, ...]) -> str:
    return ".".join(map(str, where)) or "the whole"


def _tree(value: Any, tensor: Callable[[Any], Tensor]) -> Any:
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
        return Counter(pairs) if kind == _COUNTER else pairs
    raise ValueError(f"a value of the kind {kind!r:.100}")
